"""The GPTQ update for one matrix (Frantar et al. 2022, algorithm 1), with static groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ...compiler.weights.formats.base import Parts
from ...compiler.weights.formats.grouped import GroupFormat

_BLOCK = 128
CLIPS = tuple(1.0 - i / 20 for i in range(11))


class Coder(Protocol):
    """Of a format, what choosing codes takes; see GroupFormat."""

    @property
    def group(self) -> int: ...

    def levels(self, parts: Parts) -> tuple[Tensor, ...]: ...

    def code(self, values: Tensor, *levels: Tensor) -> Tensor: ...

    def value(self, codes: Tensor, *levels: Tensor) -> Tensor: ...

    def with_codes(self, codes: Tensor, fitted: Parts) -> Parts: ...

    def decode(self, parts: Parts) -> Tensor: ...


@dataclass(frozen=True)
class Hessian:
    """Second moments of a layer's inputs.

    gram: [K, K]. order: of the columns. factor: upper Cholesky factor of the inverse of the damped, reordered gram.
    """

    gram: Tensor
    order: Tensor
    factor: Tensor

    @classmethod
    def of(cls, rows: Tensor, damping: float, act_order: bool) -> Hessian:
        """From inputs [n, K]."""
        return cls.from_gram(rows.T @ rows / max(len(rows), 1), damping, act_order)

    @classmethod
    def identity(cls, width: int) -> Hessian:
        """No calibration: every column on its own, which is rounding to nearest."""
        eye = torch.eye(width)
        return cls(eye, torch.arange(width), eye)

    @classmethod
    def from_gram(cls, gram: Tensor, damping: float, act_order: bool) -> Hessian:
        """Damp more until the factorization exists. Columns without any input stand alone."""
        diagonal = gram.diagonal()
        order = torch.argsort(diagonal, descending=True, stable=True) if act_order else torch.arange(len(gram))
        work = gram[order][:, order].to(torch.float64)
        level = float(diagonal.mean()) or 1.0
        for _ in range(8):
            damped = work + torch.eye(len(work), dtype=torch.float64) * (damping * level)
            lower, failed = torch.linalg.cholesky_ex(damped)
            if not failed:
                upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
                if not failed:
                    return cls(gram, order, upper.to(torch.float32))
            damping = max(damping * 10, 1e-6)
        return cls(gram, order, torch.eye(len(gram)))


@dataclass(frozen=True)
class Solved:
    """The quantized matrix, and the energy of its outputs and of their error under the gram matrix."""

    parts: Parts
    signal: float
    noise: float


def solve(weight: Tensor, hessian: Hessian, form: Coder, fitted: Parts | None = None) -> Solved:
    """Quantize weight [N, K] with error feedback along `hessian.order`. fitted: all parts but the codes, if they are
    not to be searched for."""
    if fitted is None:
        assert isinstance(form, GroupFormat)
        fitted = _static_groups(weight, hessian.gram.diagonal(), form)
    levels = [level.repeat_interleave(form.group, dim=1)[:, hessian.order] for level in form.levels(fitted)]
    work = weight[:, hessian.order].clone()
    codes = torch.empty_like(work)
    for start in range(0, work.shape[1], _BLOCK):
        end = min(start + _BLOCK, work.shape[1])
        errors = torch.empty(len(work), end - start)
        for j in range(start, end):
            here = [level[:, j] for level in levels]
            codes[:, j] = form.code(work[:, j], *here)
            error = (work[:, j] - form.value(codes[:, j], *here)) / hessian.factor[j, j]
            work[:, j + 1 : end] -= error[:, None] * hessian.factor[j, j + 1 : end]
            errors[:, j - start] = error
        work[:, end:] -= errors @ hessian.factor[start:end, end:]
    original = torch.empty(codes.shape, dtype=torch.uint8)
    original[:, hessian.order] = codes.to(torch.uint8)
    parts = form.with_codes(original, fitted)
    return Solved(parts, _energy(weight, hessian.gram), _energy(form.decode(parts) - weight, hessian.gram))


def _static_groups(weight: Tensor, importance: Tensor, form: GroupFormat) -> Parts:
    """All parts but the codes, of the ranges that round the weights best when columns count as `importance`."""
    grouped = weight.unflatten(-1, (-1, form.group))
    cost = importance.reshape(-1, form.group)
    best_clip = torch.ones(grouped.shape[:2])
    least = torch.full(grouped.shape[:2], float("inf"))
    for ratio in CLIPS:
        clip = torch.full_like(best_clip, ratio)
        noise = (form.rounded(weight, clip) - weight).unflatten(-1, (-1, form.group))
        loss = (noise.square_() * cost).sum(-1)
        best_clip = torch.where(loss < least, clip, best_clip)
        least = torch.minimum(loss, least)
    return form.fit(grouped, best_clip)


def _energy(weight: Tensor, gram: Tensor) -> float:
    return float(((weight @ gram) * weight).sum(dtype=torch.float64))

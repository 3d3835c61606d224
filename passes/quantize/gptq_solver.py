"""The GPTQ update for one matrix (Frantar et al. 2022, algorithm 1), with static groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ...compiler.weights.formats.base import Parts
from ...compiler.weights.formats.grouped import GroupFormat
from .descent import refine
from .inputs import gram

_LEAF = 16  # columns that are quantized one by one before their errors are applied to the following columns
CLIPS = tuple(1.0 - i / 20 for i in range(11))


class Coder(Protocol):
    """The methods of a format that the solver uses; see GroupFormat."""

    @property
    def group(self) -> int:
        """Columns that share a scale."""
        ...

    def levels(self, parts: Parts) -> tuple[Tensor, ...]:
        """The arrays that convert between codes and values: scales, and zero points if the format has them; [..., K /
        group] each."""
        ...

    def code(self, values: Tensor, *levels: Tensor) -> Tensor:
        """The nearest codes of values, in their shape."""
        ...

    def value(self, codes: Tensor, *levels: Tensor) -> Tensor:
        """The float32 values that codes stand for, in their shape."""
        ...

    def with_codes(self, codes: Tensor, fitted: Parts) -> Parts:
        """The parts of a weight with these codes [..., N, K], and with the scales of `fitted`."""
        ...

    def decode(self, parts: Parts) -> Tensor:
        """The float32 values [..., N, K] of a whole weight."""
        ...


@dataclass(frozen=True)
class Hessian:
    """Second moments of a layer's inputs.

    gram: [K, K]. order: of the columns. factor: upper Cholesky factor of the inverse of the damped, reordered gram.
    """

    gram: Tensor
    order: Tensor
    factor: Tensor

    @classmethod
    def of(cls, rows: Sequence[Tensor], damping: float, act_order: bool) -> Hessian:
        """The Hessian of inputs [n, K] of every sequence."""
        return cls.from_gram(gram(rows) / max(sum(map(len, rows)), 1), damping, act_order)

    @classmethod
    def identity(cls, width: int) -> Hessian:
        """The Hessian without calibration: columns are independent, which gives rounding to nearest."""
        eye = torch.eye(width)
        return cls(eye, torch.arange(width), eye)

    @classmethod
    def from_gram(cls, gram: Tensor, damping: float, act_order: bool) -> Hessian:
        """The Hessian of a gram [K, K], damped more until the factorization exists. Columns that are always 0 are
        independent of the others."""
        diagonal = gram.diagonal()
        order = torch.argsort(diagonal, descending=True, stable=True) if act_order else torch.arange(len(gram))
        work = gram[order][:, order].to(torch.float64)
        level = float(diagonal.mean()) or 1.0
        for _ in range(8):
            damped = work.clone()
            damped.diagonal().add_(damping * level)
            lower, failed = torch.linalg.cholesky_ex(damped)
            if not failed:
                upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
                if not failed:
                    return cls(gram, order, upper.to(torch.float32))
            damping = max(damping * 10, 1e-6)
        return cls(gram, order, torch.eye(len(gram)))

    def scaled(self, factor: Tensor) -> Hessian:
        """The Hessian for the same inputs divided by factor [K], with the same order and relative damping."""
        return Hessian(self.gram / factor / factor[:, None], self.order, self.factor * factor[self.order])


@dataclass(frozen=True)
class Solved:
    """The quantized matrix, and per row [N] the energy of its outputs and of their error under the gram matrix."""

    parts: Parts
    signals: Tensor
    noises: Tensor

    @property
    def signal(self) -> float:
        """The energy of all outputs."""
        return float(self.signals.sum(dtype=torch.float64))

    @property
    def noise(self) -> float:
        """The energy of their error."""
        return float(self.noises.sum(dtype=torch.float64))

    def split(self, rows: Sequence[int]) -> list[Solved]:
        """The solutions of several matrices whose rows were joined: `rows` of each."""
        parts = {name: value.split(list(rows)) for name, value in self.parts.items()}
        energies = zip(self.signals.split(list(rows)), self.noises.split(list(rows)), strict=True)
        return [Solved({name: value[i] for name, value in parts.items()}, *pair) for i, pair in enumerate(energies)]


def solve(
    weight: Tensor,
    hessian: Hessian,
    form: Coder,
    sweeps: int = 0,
    damping: float = 0.01,
    fitted: Parts | None = None,
) -> Solved:
    """Quantize weight [N, K] with error feedback along `hessian.order`. fitted: all parts but the codes; None: they are
    searched for.

    Rows are independent: matrices that read one input are solved as one, with their rows concatenated. sweeps: sweeps
    of descent.py, with that damping.
    """
    if fitted is None:
        assert isinstance(form, GroupFormat)
        fitted = _static_groups(weight, hessian.gram.diagonal(), form)
    levels = [level.T.contiguous() for level in form.levels(fitted)]
    work = weight.T[hessian.order].contiguous()  # [K, N], so that a column of the weight is contiguous
    columns = _Columns(work, torch.empty_like(work), levels, (hessian.order // form.group).tolist(), hessian, form)
    columns.quantize(0, len(work))
    codes = torch.empty_like(columns.work, dtype=torch.uint8)
    codes[hessian.order] = columns.work.to(torch.uint8)
    parts = form.with_codes(codes.T.contiguous(), fitted)
    if sweeps:
        assert isinstance(form, GroupFormat)
        parts = refine(weight, parts, hessian.gram, damping, form, sweeps)
    return Solved(parts, _energies(weight, hessian.gram), _energies(form.decode(parts) - weight, hessian.gram))


@dataclass
class _Columns:
    """A matrix [K, N] whose rows, the columns of a weight, become codes one after the other.

    errors [K, N]: the errors of finished columns, in the form that later columns subtract. groups: which entry of
    `levels` [K / group, N] each column has.
    """

    work: Tensor
    errors: Tensor
    levels: list[Tensor]
    groups: list[int]
    hessian: Hessian
    form: Coder

    def quantize(self, start: int, end: int) -> None:
        """Quantize columns start to end, by halves: one product applies the errors of the first half to the second,
        which is the paper's lazy batch of updates at every size."""
        if end - start <= _LEAF:
            return self._leaf(start, end)
        middle = start + (end - start + 1) // 2
        self.quantize(start, middle)
        factor = self.hessian.factor[start:middle, middle:end]
        self.work[middle:end].addmm_(factor.T, self.errors[start:middle], alpha=-1)
        return self.quantize(middle, end)

    def _leaf(self, start: int, end: int) -> None:
        work, factor = self.work, self.hessian.factor
        scales = factor.diagonal()[start:end].tolist()
        for j in range(start, end):
            here = [level[self.groups[j]] for level in self.levels]
            codes = self.form.code(work[j], *here)
            error = torch.sub(work[j], self.form.value(codes, *here), out=self.errors[j]).div_(scales[j - start])
            work[j] = codes
            if j + 1 < end:
                work[j + 1 : end].addr_(factor[j, j + 1 : end], error, alpha=-1)


def _static_groups(weight: Tensor, importance: Tensor, form: GroupFormat) -> Parts:
    """All parts but the codes, for the ranges that round the weights best if columns are weighted by `importance`."""
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


def _energies(weight: Tensor, gram: Tensor) -> Tensor:
    return ((weight @ gram) * weight).sum(1)

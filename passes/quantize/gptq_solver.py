"""The GPTQ update for one matrix (Frantar et al. 2022, algorithm 1), with static groups."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...compiler.weights.handles import QuantParts, group_range
from .rounding import round_values

_BLOCK = 128
CLIPS = tuple(1.0 - i / 20 for i in range(11))


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

    parts: QuantParts
    signal: float
    noise: float


def solve(weight: Tensor, hessian: Hessian, bits: int, group: int) -> Solved:
    """Quantize weight [N, K] with error feedback along `hessian.order`."""
    scale, zero = _static_groups(weight, hessian.gram.diagonal(), bits, group)
    column_scale, column_zero = (t.repeat_interleave(group, dim=1)[:, hessian.order] for t in (scale, zero))
    work = weight[:, hessian.order].clone()
    codes = torch.empty_like(work)
    top = 2**bits - 1
    for start in range(0, work.shape[1], _BLOCK):
        end = min(start + _BLOCK, work.shape[1])
        errors = torch.empty(len(work), end - start)
        for j in range(start, end):
            s, z = column_scale[:, j], column_zero[:, j]
            codes[:, j] = (torch.round(work[:, j] / s) + z).clamp_(0, top)
            error = (work[:, j] - (codes[:, j] - z) * s) / hessian.factor[j, j]
            work[:, j + 1 : end] -= error[:, None] * hessian.factor[j, j + 1 : end]
            errors[:, j - start] = error
        work[:, end:] -= errors @ hessian.factor[start:end, end:]
    original = torch.empty(codes.shape, dtype=torch.uint8)
    original[:, hessian.order] = codes.to(torch.uint8)
    parts = QuantParts(original, scale, zero.to(torch.uint8))
    return Solved(parts, _energy(weight, hessian.gram), _energy(parts.dequantize() - weight, hessian.gram))


def _static_groups(weight: Tensor, importance: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor]:
    """Scale and zero point per group, of the range that rounds the weights best when columns count as `importance`."""
    grouped = weight.unflatten(-1, (-1, group))
    cost = importance.reshape(-1, group)
    best_clip = torch.ones(grouped.shape[:2])
    least = torch.full(grouped.shape[:2], float("inf"))
    for ratio in CLIPS:
        clip = torch.full_like(best_clip, ratio)
        noise = (round_values(weight, bits, group, clip) - weight).unflatten(-1, (-1, group))
        loss = (noise.square_() * cost).sum(-1)
        best_clip = torch.where(loss < least, clip, best_clip)
        least = torch.minimum(loss, least)
    return group_range(grouped, bits, best_clip)


def _energy(weight: Tensor, gram: Tensor) -> float:
    return float(((weight @ gram) * weight).sum(dtype=torch.float64))

"""The summary of a linear layer's inputs that calibration keeps: their second moments, and a sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from .select import EXPERT
from .stream import Inputs

# up to this K the Gram matrix is exact; above it, this many rows (more for wider layers) are sampled evenly
EXACT_WIDTH = 1024
_SAMPLED = 512  # approximate number of inputs that are kept per expert
_PANEL = 384  # columns of a symmetric product that are computed together


@dataclass(frozen=True)
class LayerInputs:
    """rows[e]: float32 [R, K] with the Gram matrix of expert e's inputs, up to a factor; magnitude[K]: mean |x|;
    peak[K]: the largest |x|. sample[e]: some of the inputs themselves."""

    rows: tuple[Tensor, ...]
    magnitude: Tensor
    peak: Tensor
    sample: tuple[Tensor, ...]


def expert_rows(node: fx.Node, inputs: Inputs) -> list[list[Tensor]]:
    """The inputs [n, K] that each expert gets of each sequence: [expert][sequence]; a linear layer is one expert."""
    x: Any = node.args[0]
    if node.target is not EXPERT:
        return [[value.reshape(-1, value.shape[-1]) for value in inputs[x]]]
    index: Any = node.args[3]
    count = node.args[1].meta["type"].shape[0]  # type: ignore[union-attr]
    found: list[list[Tensor]] = [[] for _ in range(count)]
    if index is None:  # the input has a row for each expert
        return [[tokens[:, expert] for tokens in inputs[x]] for expert in range(count)]
    for tokens, routes in zip(inputs[x], inputs[index], strict=True):
        slots = tokens if tokens.dim() == 3 else tokens.unsqueeze(1).expand(-1, routes.shape[1], -1)
        for expert, rows in enumerate(found):
            rows.append(slots[routes == expert])
    return found


def gram(rows: Sequence[Tensor]) -> Tensor:
    """The sum of x^T x over inputs [n, K] of every sequence: float32 [K, K]. One half is computed and mirrored."""
    width = rows[0].shape[-1]
    total = rows[0].new_zeros(width, width)
    for x in rows:
        for start in range(0, width, _PANEL):
            end = min(start + _PANEL, width)
            total[start:end, start:].addmm_(x[:, start:end].T, x[:, start:])
    return total.triu_().add_(total.triu(1).T)


def summarize(rows: list[list[Tensor]]) -> LayerInputs:
    """Reduce the inputs of a layer, [n, K] as from `expert_rows`, to the summary that the AWQ searches need."""
    total = sum(len(x) for expert in rows for x in expert)
    sizes = [x.abs() for expert in rows for x in expert if len(x)] or [rows[0][0].new_zeros(1, rows[0][0].shape[-1])]
    magnitude = torch.stack([x.sum(0) for x in sizes]).sum(0) / max(total, 1)
    peak = torch.stack([x.amax(0) for x in sizes]).amax(0)
    some = max(1, total // (_SAMPLED * len(rows)))
    sample = tuple(torch.cat([x[::some] for x in expert]) for expert in rows)
    return LayerInputs(tuple(_compress(expert) for expert in rows), magnitude, peak, sample)


def _compress(rows: list[Tensor]) -> Tensor:
    """R rows [R, K] with the Gram matrix of all rows: its square root, or a sample if K is large."""
    count, width = sum(len(x) for x in rows), rows[0].shape[-1]
    if count <= width:
        return torch.cat(rows)
    if width > EXACT_WIDTH:
        return torch.cat(rows)[:: max(1, count // EXACT_WIDTH)].clone()
    values, vectors = torch.linalg.eigh(gram(rows).to(torch.float64))
    return (vectors * values.clamp(min=0).sqrt()).T.to(torch.float32).contiguous()


def output_energy(weight: Tensor, rows: Tensor) -> float:
    """Squared norm of the outputs rows [R, K] @ weight [N, K]^T."""
    return float((rows @ weight.T).square().sum(dtype=torch.float64))

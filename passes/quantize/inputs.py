"""What calibration keeps of a linear layer's inputs: rows whose Gram matrix stands for all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from .select import EXPERT
from .stream import Inputs

# up to this K the Gram matrix is exact; above it, this many rows (more for wider layers) are sampled evenly
EXACT_WIDTH = 1024


@dataclass(frozen=True)
class LayerInputs:
    """rows[e]: float32 [R, K] with the Gram matrix of expert e's inputs, up to a factor; magnitude[K]: mean |x|."""

    rows: tuple[Tensor, ...]
    magnitude: Tensor


def expert_rows(node: fx.Node, inputs: Inputs) -> list[Tensor]:
    """The inputs [n, K] that each expert gets over all sequences; one entry for a plain linear layer."""
    x: Any = node.args[0]
    if node.target is not EXPERT:
        return [torch.cat([value.reshape(-1, value.shape[-1]) for value in inputs[x]])]
    index: Any = node.args[3]
    count = node.args[1].meta["type"].shape[0]  # type: ignore[union-attr]
    tokens = torch.cat(inputs[x])
    routes = torch.cat(inputs[index])
    slots = tokens if tokens.dim() == 3 else tokens.unsqueeze(1).expand(-1, routes.shape[1], -1)
    return [slots[routes == e] for e in range(count)]


def summarize(rows: list[Tensor]) -> LayerInputs:
    """Shrink the inputs of a layer to what the AWQ searches need."""
    total = sum(len(r) for r in rows)
    magnitude = torch.stack([r.abs().sum(0) for r in rows]).sum(0) / max(total, 1)
    return LayerInputs(tuple(_compress(r) for r in rows), magnitude)


def _compress(rows: Tensor) -> Tensor:
    count, width = rows.shape
    if count <= width:
        return rows.clone()
    if width > EXACT_WIDTH:
        return rows[:: max(1, count // EXACT_WIDTH)].clone()
    gram = (rows.T @ rows).to(torch.float64)
    values, vectors = torch.linalg.eigh(gram)
    return (vectors * values.clamp(min=0).sqrt()).T.to(torch.float32).contiguous()


def output_energy(weight: Tensor, rows: Tensor) -> float:
    """Squared norm of the outputs rows @ weight^T."""
    return float((rows @ weight.T).square().sum(dtype=torch.float64))

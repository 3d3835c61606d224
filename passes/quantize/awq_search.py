"""The two searches of AWQ (Lin et al. 2023): channel scales for layers that share an input, and clipping per group."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...compiler.weights.formats.base import StorageFormat
from .fold import factors
from .inputs import LayerInputs, output_energy

ALPHAS = tuple(i / 20 for i in range(20))
CLIPS = tuple(1.0 - i / 40 for i in range(15))
_ROWS = 512
_OUTPUTS = 2048  # at least so many outputs of a wide layer, spread evenly, stand for all of them in a scale search


@dataclass(frozen=True)
class Member:
    """A linear layer in a search: float weights [E?, N, K], its inputs, and the scale class of each input channel."""

    weight: Tensor
    inputs: LayerInputs
    classes: Tensor | None
    format: StorageFormat


def search_scales(members: list[Member], count: int) -> Tensor | None:
    """Scales [count] = magnitude ** alpha for the alpha with the least output error; None where no scale is better."""
    magnitude = _class_magnitude(members, count)
    best, best_loss = None, float("inf")
    for alpha in ALPHAS:
        scales = magnitude.pow(alpha).clamp(min=1e-4)
        scales = scales / (scales.max() * scales.min()).sqrt()
        loss = sum(_loss(member, scales) for member in members)
        if loss < best_loss:
            best, best_loss = (scales if alpha else None), loss
    return best


def _class_magnitude(members: list[Member], count: int) -> Tensor:
    total, seen = torch.zeros(count), torch.zeros(count)
    for member in members:
        if member.classes is not None:
            free = member.classes >= 0
            total.index_add_(0, member.classes[free], member.inputs.magnitude[free])
            seen.index_add_(0, member.classes[free], torch.ones(int(free.sum())))
    return total / seen.clamp(min=1)


def _loss(member: Member, scales: Tensor) -> float:
    """Squared error of the layer's outputs when its scaled weights are rounded."""
    weight = member.weight[..., :: max(1, member.weight.shape[-2] // _OUTPUTS), :]
    factor = torch.ones(weight.shape[-1]) if member.classes is None else factors(scales, member.classes)
    noise = member.format.rounded(weight * factor) / factor - weight
    planes = noise.reshape(-1, *noise.shape[-2:])
    return sum(output_energy(w, rows) for w, rows in zip(planes, member.inputs.rows, strict=True))


def search_clip(weight: Tensor, rows: tuple[Tensor, ...], form: StorageFormat) -> Tensor:
    """Clip ratios float16 [E?, N, blocks of K], each chosen for the output error that its own block makes."""
    planes = weight.reshape(-1, *weight.shape[-2:])
    chosen = [_clip_plane(w, r, form) for w, r in zip(planes, rows, strict=True)]
    return torch.stack(chosen).reshape(*weight.shape[:-1], -1).to(torch.float16)


def _clip_plane(weight: Tensor, rows: Tensor, form: StorageFormat) -> Tensor:
    group = form.block[1]
    count = weight.shape[-1] // group
    grouped = rows.reshape(len(rows), count, group).transpose(0, 1)
    gram = grouped.transpose(1, 2) @ grouped
    best = torch.ones(weight.shape[0], count)
    if not len(rows):
        return best
    for start in range(0, weight.shape[0], _ROWS):
        part = weight[start : start + _ROWS]
        least = torch.full((len(part), count), float("inf"))
        for ratio in CLIPS:
            clip = torch.full((len(part), count), ratio)
            noise = (form.rounded(part, clip) - part).reshape(len(part), count, group).transpose(0, 1)
            loss = ((noise @ gram) * noise).sum(-1).T
            better = loss < least
            best[start : start + _ROWS][better] = ratio
            least = torch.where(better, loss, least)
    return best

"""The two searches of AWQ (Lin et al. 2023): channel scales for layers that share an input, and clipping per group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...compiler.weights.formats.base import StorageFormat
from .fold import factors
from .inputs import LayerInputs, output_energy

ALPHA_STEPS = 20  # alphas are i / 20, from 0 to below 1
CLIPS = tuple(1.0 - i / 40 for i in range(15))
_ROWS = 512
_OUTPUTS = 512  # a scale search samples this many outputs of a wide layer, spread evenly


@dataclass(frozen=True)
class Member:
    """A linear layer in a search: float weights [E?, N, K], its inputs, and the scale class of each input channel."""

    weight: Tensor
    inputs: LayerInputs
    classes: Tensor | None
    format: StorageFormat


Loss = Callable[[Member, Tensor], float]
"""The error of a layer's outputs if its input channels have these scales."""


def search_scales(members: list[Member], count: int, loss: Loss) -> Tensor | None:
    """Scales [count] = magnitude ** alpha for the alpha with the least output error; None if no scale is better than
    ones."""
    magnitude = _class_magnitude(members, count)

    def at(step: int) -> Tensor:
        scales = magnitude.pow(step / ALPHA_STEPS).clamp(min=1e-4)
        return scales / (scales.max() * scales.min()).sqrt()

    best = least(lambda step: sum(loss(member, at(step)) for member in members), range(ALPHA_STEPS))
    return at(best) if best else None


def least(loss: Callable[[int], float], steps: range) -> int:
    """The step with the least loss: tries every fourth step, then two and one beside the best; 9 losses for 20
    steps."""
    known = {step: loss(step) for step in steps[::4]}
    for width in (2, 1):
        best = min(known, key=lambda step: (known[step], step))
        known.update({step: loss(step) for step in (best - width, best + width) if step in steps and step not in known})
    return min(known, key=lambda step: (known[step], step))


def _class_magnitude(members: list[Member], count: int) -> Tensor:
    total, seen = torch.zeros(count), torch.zeros(count)
    for member in members:
        if member.classes is not None:
            free = member.classes >= 0
            total.index_add_(0, member.classes[free], member.inputs.magnitude[free])
            seen.index_add_(0, member.classes[free], torch.ones(int(free.sum())))
    return total / seen.clamp(min=1)


def nearest_loss(member: Member, scales: Tensor) -> float:
    """Squared error of the layer's outputs when its weights, scaled by scales [count], are rounded."""
    spread = max(1, member.weight.shape[-2] // _OUTPUTS)
    weight = member.weight[..., ::spread, :]
    factor = torch.ones(weight.shape[-1]) if member.classes is None else factors(scales, member.classes)
    noise = member.format.rounded(weight * factor) / factor - weight
    planes = noise.reshape(-1, *noise.shape[-2:])
    return spread * sum(output_energy(w, rows) for w, rows in zip(planes, member.inputs.rows, strict=True))


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

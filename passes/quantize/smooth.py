"""SmoothQuant: products of int8 weights and int8 activations (Xiao et al. 2023, arXiv:2211.10438).

A few channels of the activations are far larger than all others, and one scale per row leaves few levels for the
others. Channels are divided by factors that make them even, and the weights that read them are multiplied by these, if
the data flow allows folding (see fold.py): s[k] = max|x[k]| ** alpha / max|w[:, k]| ** (1 - alpha), with the alpha for
each group of layers that leaves the least error when both sides are rounded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...compiler.weights.formats.base import decibels
from .awq import QuantizeAwq
from .awq_search import ALPHA_STEPS, Member, least
from .fold import factors

_OUTPUTS = 512  # this many outputs of a wide layer, spread evenly, are sampled


@dataclass(frozen=True)
class QuantizeSmooth(QuantizeAwq):
    """int8 codes with a scale per output channel; smoothing factors are folded where possible."""

    name: ClassVar[str] = "quantize-smooth"

    format: str = "i8"

    def _scales(self, members: list[Member], count: int) -> Tensor | None:
        inputs, weights = _peaks(members, count)

        def at(step: int) -> Tensor:
            alpha = step / ALPHA_STEPS
            scales = (inputs.pow(alpha) / weights.pow(1 - alpha)).clamp(min=1e-4, max=1e4)
            return torch.where((inputs > 0) & (weights > 0), scales, 1.0) if step else torch.ones(count)

        best = least(lambda step: sum(_errors(member, at(step))[1] for member in members), range(ALPHA_STEPS + 1))
        return at(best) if best else None

    def _choose(self, member: Member, scales: Tensor | None) -> tuple[Tensor | None, dict[str, Any]]:
        signal, noise = _errors(member, scales)
        scaled = scales is not None and member.classes is not None
        return None, {"output_snr_db": decibels(signal, noise), "scaled": scaled}


def _peaks(members: list[Member], count: int) -> tuple[Tensor, Tensor]:
    """The largest input and the largest weight among the channels of each scale: [count] each."""
    inputs, weights = torch.zeros(count), torch.zeros(count)
    for member in members:
        if member.classes is not None:
            free = member.classes >= 0
            where, peaks = member.classes[free], member.weight.reshape(-1, member.weight.shape[-1]).abs().amax(0)
            inputs.scatter_reduce_(0, where, member.inputs.peak[free], "amax")
            weights.scatter_reduce_(0, where, peaks[free], "amax")
    return inputs, weights


def _errors(member: Member, scales: Tensor | None) -> tuple[float, float]:
    """The energy of a layer's outputs, and of their error when scaled weights and scaled inputs are rounded."""
    spread = max(1, member.weight.shape[-2] // _OUTPUTS)
    weight = member.weight[..., ::spread, :]
    plain = scales is None or member.classes is None
    factor = torch.ones(weight.shape[-1]) if plain else factors(scales, member.classes)  # type: ignore[arg-type]
    signal = noise = 0.0
    for plane, rows in zip(weight.reshape(-1, *weight.shape[-2:]), member.inputs.sample, strict=True):
        expected = rows @ plane.T
        found = member.format.coded_rows(rows / factor) @ member.format.rounded(plane * factor).T
        signal += float(expected.square().sum(dtype=torch.float64))
        noise += float((found - expected).square().sum(dtype=torch.float64))
    return signal, noise

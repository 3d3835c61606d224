"""Scales for weights that GPTQ rounds: the loss of a scale is the error after GPTQ, not after rounding to nearest."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...compiler.weights.formats.grouped import GroupFormat
from .awq_search import Member, nearest_loss
from .fold import factors
from .gptq_solver import Hessian, solve
from .inputs import gram

_OUTPUTS = 192  # this many outputs, spread evenly, are sampled


@dataclass
class GptqLoss:
    """Squared error of a layer's outputs when GPTQ rounds its scaled weights; Hessians are computed once per input."""

    damping: float = 0.01
    hessians: dict[int, Hessian] = field(default_factory=dict)

    def __call__(self, member: Member, scales: Tensor) -> float:
        if member.weight.dim() > 2 or not isinstance(member.format, GroupFormat) or not len(member.inputs.rows[0]):
            return nearest_loss(member, scales)
        spread = max(1, member.weight.shape[-2] // _OUTPUTS)
        weight = member.weight[::spread]
        factor = torch.ones(weight.shape[-1]) if member.classes is None else factors(scales, member.classes)
        solved = solve(weight * factor, self._hessian(member).scaled(factor), member.format)
        return spread * solved.noise

    def _hessian(self, member: Member) -> Hessian:
        key = id(member.inputs)
        if key not in self.hessians:
            self.hessians[key] = Hessian.from_gram(gram(member.inputs.rows), self.damping, act_order=True)
        return self.hessians[key]

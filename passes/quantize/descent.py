"""Coordinate descent after GPTQ: each code, and each scale, is chosen again with all others fixed, so that the error of
the outputs only falls (QuantEase, Behdin et al. 2023, arXiv:2309.01885)."""

from __future__ import annotations

import torch
from torch import Tensor

from ...compiler.weights.formats.base import Parts
from ...compiler.weights.formats.grouped import GroupFormat

_BLOCK = 64  # columns whose changes are applied to the others together


def refine(weight: Tensor, parts: Parts, gram: Tensor, damping: float, form: GroupFormat, sweeps: int) -> Parts:
    """Better codes and scales for weight [N, K] under a Gram matrix [K, K] of its inputs."""
    moments = gram.clone()
    moments.diagonal().add_(damping * (float(gram.diagonal().mean()) or 1.0))
    for _ in range(sweeps):
        parts = _codes(weight, parts, moments, form)
        if "scales" in parts:
            parts = _scales(weight, parts, moments, form)
    return parts


def _codes(weight: Tensor, parts: Parts, moments: Tensor, form: GroupFormat) -> Parts:
    levels = [level.T.contiguous() for level in form.levels(parts)]  # [K / group, N]
    values = form.decode(parts).T.contiguous()  # [K, N]
    codes = parts["codes"].T.to(torch.float32).contiguous()
    slope = moments @ (values - weight.T)
    change = torch.empty(_BLOCK, len(weight))
    diagonal = moments.diagonal().tolist()
    for start in range(0, len(values), _BLOCK):
        end = min(start + _BLOCK, len(values))
        for j in range(start, end):
            here = [level[j // form.group] for level in levels]
            codes[j] = form.code(values[j] - slope[j] / diagonal[j], *here)
            change[j - start] = form.value(codes[j], *here) - values[j]
            slope[j:end].addr_(moments[j, j:end], change[j - start])
        rest = change[: end - start]
        slope[:start].addmm_(moments[:start, start:end], rest)
        slope[end:].addmm_(moments[end:, start:end], rest)
    fitted = {name: value for name, value in parts.items() if name != "codes"}
    return form.with_codes(codes.T.contiguous().to(torch.uint8), fitted)


def _scales(weight: Tensor, parts: Parts, moments: Tensor, form: GroupFormat) -> Parts:
    """The best scale of each group for its codes, one group after the other."""
    scales = parts["scales"].clone()
    slope = (form.decode(parts) - weight) @ moments  # [N, K]
    for number in range(scales.shape[1]):
        here = slice(number * form.group, (number + 1) * form.group)
        old = scales[:, number].clone()
        unit = form.value(parts["codes"][:, here].to(torch.float32), *_unit(form, parts, number))
        curvature = ((unit @ moments[here, here]) * unit).sum(1)
        step = -(unit * slope[:, here]).sum(1) / curvature.clamp(min=1e-30)
        new = (old + step).to(torch.float16).to(torch.float32)
        new = torch.where((new > 0) & torch.isfinite(new), new, old)
        slope += ((new - old)[:, None] * unit) @ moments[here]
        scales[:, number] = new
    return {**parts, "scales": scales}


def _unit(form: GroupFormat, parts: Parts, number: int) -> list[Tensor]:
    """The levels of a group whose scale is one."""
    ones = {**parts, "scales": torch.ones_like(parts["scales"])}
    return [level[:, number, None] for level in form.levels(ones)]

"""Checkpoints with matrices of 4-bit floats (E2M1) and separate scales, in all layouts that quantizers write.

MXFP4: a power of two per 32 values; gpt-oss (`*_blocks`, `*_scales`) and compressed-tensors (mxfp4-pack-quantized).
NVFP4: an 8-bit float per 16 values and one float32 per tensor; ModelOpt (`weight_scale_2` multiplies) and compressed-
tensors (nvfp4-pack-quantized, `weight_global_scale` divides).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from ...errors import TensorError, UnsupportedModel
from ...weights.formats.base import Parts
from ...weights.formats.float8 import NAN
from ...weights.formats.tables import MXFP4_FORMAT, TableFormat, nvfp4
from ...weights.handles import QuantizedWeight, Transposed, Weight

_AGAIN = "download the checkpoint again"
_E4M3 = torch.float8_e4m3fn
_BESIDE = ("weight_scale", "weight_scale_2", "weight_global_scale", "input_scale", "input_global_scale")
_REFUSED = ("weight_zero_point", "pre_quant_scale", "weight_g_idx")


def with_floats(tensors: Mapping[str, Weight]) -> dict[str, Weight]:
    """The checkpoint with one handle in place of each matrix of 4-bit floats and its scales.

    TensorError if scales are missing or do not fit their matrix; UnsupportedModel for tensors that change the values in
    another way.
    """
    taken: set[str] = set()
    found: dict[str, Weight] = {}
    for name, codes in tensors.items():
        layer, _, last = name.rpartition(".")
        if name.endswith("_blocks"):
            whole = name.removesuffix("_blocks")
            taken |= {name, f"{whole}_scales"}
            found[whole] = Transposed(_blocks(whole, codes, _tensor(tensors, f"{whole}_scales")))
        elif last in ("weight", "weight_packed") and codes.dtype == torch.uint8:
            for other in _REFUSED:
                if f"{layer}.{other}" in tensors:
                    raise UnsupportedModel(f"layer {layer!r} of 4-bit floats has a {other}", "icc reads none such")
            taken |= {name, *(f"{layer}.{beside}" for beside in _BESIDE)}
            found[f"{layer}.weight"] = _layer(layer, codes, tensors)
    return {**{name: weight for name, weight in tensors.items() if name not in taken}, **found}


def _tensor(tensors: Mapping[str, Weight], name: str) -> Weight:
    if name not in tensors:
        raise TensorError(name, "is missing from the checkpoint", _AGAIN)
    return tensors[name]


def _blocks(name: str, blocks: Weight, scales: Weight) -> E2m1Matrix:
    """The matrices of experts stored as [E, N, blocks, bytes]; transformers transposes each matrix."""
    if len(blocks.shape) < 3 or blocks.shape[:-1] != scales.shape or {blocks.dtype, scales.dtype} != {torch.uint8}:
        raise _misfit(f"{name}_scales", scales, blocks)
    *lead, n, groups, size = blocks.shape
    if size * 2 != MXFP4_FORMAT.group:
        raise _misfit(f"{name}_scales", scales, blocks)
    return E2m1Matrix(name, blocks, scales, None, MXFP4_FORMAT, (*lead, n, groups * size * 2))


def _layer(layer: str, codes: Weight, tensors: Mapping[str, Weight]) -> E2m1Matrix:
    scales = _tensor(tensors, f"{layer}.weight_scale")
    if len(codes.shape) < 2 or 0 in codes.shape:
        raise _misfit(f"{layer}.weight_scale", scales, codes)
    *lead, n, half = codes.shape
    shape, k = (*lead, n, 2 * half), 2 * half
    whole = tensors.get(f"{layer}.weight_scale_2"), tensors.get(f"{layer}.weight_global_scale")
    if whole == (None, None) and scales.dtype == torch.uint8 and scales.shape == (*lead, n, k // 32) and k % 32 == 0:
        return E2m1Matrix(layer, codes, scales, None, MXFP4_FORMAT, shape)
    one = whole[0] or whole[1]
    groups = scales.shape[-1] if scales.shape[:-1] == (*lead, n) else 0
    if one is None or scales.dtype != _E4M3 or not groups or k % (16 * groups):  # ModelOpt also has groups of 32
        raise _misfit(f"{layer}.weight_scale", scales, codes)
    if one.shape not in ((), (1,), (*lead, 1), tuple(lead)) or not one.dtype.is_floating_point:
        raise _misfit(f"{layer}.{'weight_scale_2' if whole[0] else 'weight_global_scale'}", one, codes)
    return E2m1Matrix(layer, codes, scales, one, nvfp4_of(k), shape, whole[0] is None)


def nvfp4_of(k: int) -> TableFormat:
    """NVFP4 for rows of K values, a multiple of 16. The scale of the tensor is stored once per up to 512 values."""
    return nvfp4(next(size for size in (512, 256, 128, 64, 32, 16) if k % size == 0))


def _misfit(what: str, scales: Weight, codes: Weight) -> TensorError:
    kind = str(scales.dtype).removeprefix("torch.")
    return TensorError(what, f"is {kind} {list(scales.shape)} for 4-bit floats {list(codes.shape)}", _AGAIN)


@dataclass
class E2m1Matrix(QuantizedWeight):
    """A matrix [N, K], or matrices of experts [E, N, K], of 4-bit floats.

    one: the scale of the whole tensor, or None. divides: the scales of groups are divided by it, else multiplied.
    """

    name: str
    codes: Weight
    scales: Weight
    one: Weight | None
    format: TableFormat
    shape: tuple[int, ...]
    divides: bool = False
    dtype: torch.dtype = field(init=False, default=torch.float32)
    given: ClassVar[bool] = True

    def parts(self) -> Parts:
        """The codes and the scales of groups; see QuantizedWeight."""
        pairs = self.codes.load()
        codes = torch.stack((pairs & 15, pairs >> 4), -1).reshape(self.shape)
        scales = self.scales.load().view(torch.uint8)
        if self.one is None:
            if bool((scales == 255).any()):
                raise TensorError(self.name, "has scales that are NaN", "the checkpoint is damaged")
            return {"codes": codes, "exponents": scales}
        if bool(((scales & NAN) == NAN).any()):
            raise TensorError(self.name, "has scales that are NaN", "the checkpoint is damaged")
        each = scales.repeat_interleave(self.shape[-1] // 16 // scales.shape[-1], -1)
        return {"codes": codes, "scales": self._rows(self.one.load()), "group_scales": each}

    def _rows(self, one: Tensor) -> Tensor:
        """The scale of the tensor `one`, repeated for each block of the format: float32 [..., N, K / size]."""
        *lead, n, k = self.shape
        value = one.to(torch.float32).reshape(*(lead if one.numel() > 1 else [1] * len(lead)), 1, 1)
        value = value.reciprocal() if self.divides else value
        if not bool(torch.isfinite(value).all()):
            raise TensorError(self.name, "has a tensor scale that is NaN or Inf", "the checkpoint is damaged")
        return value.expand(*lead, n, k // self.format.size).contiguous()

"""Checkpoints of HQQ, as saved by transformers and by hqq itself: codes, and a scale and a zero per group.

(Badri and Shaji 2023, "Half-Quadratic Quantization", github.com/dropbox/hqq.) A value is scale (code - zero), where the
zero need not be an integer; the engine stores scale times zero, as float16. In the file each group is a row, [N K /
group, group]. The rows are cut into equal parts, and each item packs one code of every part, that of the first part in
the highest bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil, prod
from typing import ClassVar

import torch
from torch import Tensor

from ...errors import TensorError, UnsupportedModel
from ...weights.formats.base import Parts
from ...weights.formats.blocks import OFFSET_SCALES, STEP, BlockFormat, with_offsets
from ...weights.handles import QuantizedWeight, Weight
from .words import half_offsets

_AGAIN = "download the checkpoint again"
_ITEMS = {8: (torch.uint8, 1), 4: (torch.uint8, 2), 3: (torch.int32, 10), 2: (torch.uint8, 4), 1: (torch.uint8, 8)}
_PARTS = (
    "W_q", "scale", "zero", "shape", "nbits", "group_size", "axis", "packing", "unpack_view_dtype", "view_as_float",
    "quant_scale", "quant_zero", "compute_dtype", "offload_meta", "encoded_state_dict", "stores_quant_config",
    "channel_wise", "optimize", "round_zero",
)  # fmt: skip


def with_zeros(tensors: Mapping[str, Weight]) -> dict[str, Weight]:
    """The checkpoint with one handle in place of the tensors of each layer, by the name of its weight. TensorError if
    tensors are missing or do not fit, UnsupportedModel for other groupings or storage."""
    found = dict(tensors)
    for name in tensors:
        layer, _, last = name.rpartition(".")
        if last == "W_q":
            own = {part: found.pop(f"{layer}.{part}") for part in _PARTS if f"{layer}.{part}" in tensors}
            found[f"{layer}.weight"] = HqqMatrix(layer, own)
    return found


@dataclass
class HqqMatrix(QuantizedWeight):
    """A matrix [N, K] of codes of 1 to 8 bits; the engine stores 1-bit codes in 2 bits."""

    layer: str
    tensors: Mapping[str, Weight]
    bits: int = field(init=False)
    format: BlockFormat = field(init=False)
    shape: tuple[int, ...] = field(init=False)
    dtype: torch.dtype = field(init=False, default=torch.float32)
    given: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.bits, group, axis = (self._number(name) for name in ("nbits", "group_size", "axis"))
        kinds = {self._part(name).dtype for name in ("scale", "zero")}
        kind = OFFSET_SCALES.get(next(iter(kinds))) if len(kinds) == 1 else None
        coded = any(self._number(name, 0) for name in ("view_as_float", "quant_scale", "quant_zero"))
        if axis != 1 or coded or kind is None or self.bits not in _ITEMS or group <= 0 or group % STEP:
            raise UnsupportedModel(
                f"layer {self.layer!r} is HQQ of {self.bits} bits in groups of {group} along axis {axis}"
                + (", with scales that are quantized or codes that are stored as floats" if coded else ""),
                f"icc reads 1, 2, 3, 4 and 8 bits in groups of a multiple of {STEP} along axis 1, with plain scales of "
                "float16 or bfloat16",
            )
        shape = self._part("shape").load().flatten().tolist()
        n, k = shape if len(shape) == 2 else (0, 0)
        self.shape = n, k
        item, per = _ITEMS[self.bits]
        codes, groups = self._part("W_q"), n * k // group
        fits = n > 0 and k % group == 0 and codes.dtype == item and codes.shape == (ceil(groups / per), group)
        if not fits or {prod(self._part(name).shape) for name in ("scale", "zero")} != {groups}:
            kind = str(codes.dtype).removeprefix("torch.")
            raise TensorError(
                f"{self.layer}.W_q",
                f"is {kind} {list(codes.shape)}, no matrix {list(shape)} of {self.bits} bits in groups of {group}",
                _AGAIN,
            )
        self.format = with_offsets(max(self.bits, 2), group, kind)

    def _part(self, name: str) -> Weight:
        if name not in self.tensors:
            raise TensorError(f"{self.layer}.{name}", "is missing from the checkpoint", _AGAIN)
        return self.tensors[name]

    def _number(self, name: str, default: int | None = None) -> int:
        if name not in self.tensors and default is not None:
            return default
        value = self._part(name)
        if prod(value.shape) != 1:
            raise TensorError(f"{self.layer}.{name}", f"has shape {list(value.shape)}, not one number", _AGAIN)
        return int(value.load().item())

    def parts(self) -> Parts:
        """The codes, scales and offsets that are subtracted; see QuantizedWeight."""
        (n, k), group = self.shape, self.format.group
        codes = _rows(self._part("W_q").load(), self.bits)[: n * k // group].reshape(n, k)
        scales, zeros = (self._part(name).load().to(torch.float32).reshape(n, -1) for name in ("scale", "zero"))
        return {"codes": codes, "scales": scales, "mins": half_offsets(scales * zeros, f"{self.layer}.zero")}


def _rows(items: Tensor, bits: int) -> Tensor:
    """Unpack `items` [rows / n, group], each of n codes, into codes uint8 [rows, group]; see the module."""
    per = _ITEMS[bits][1]
    return torch.cat([(items >> bits * (per - 1 - i)) & (2**bits - 1) for i in range(per)]).to(torch.uint8)

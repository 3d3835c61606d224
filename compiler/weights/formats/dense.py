"""Formats without codes: f32, bf16, f16 and integers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .base import Array, Encoded, Parts, StorageFormat, decibels

_SHORT = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "bool",
}
DTYPES = {short: dtype for dtype, short in _SHORT.items()}


def short_dtype(dtype: torch.dtype) -> str:
    """f32, bf16, ...: the name of a dtype in graph texts and program files."""
    return _SHORT.get(dtype, str(dtype).removeprefix("torch."))


@dataclass(frozen=True)
class Dense(StorageFormat):
    """One part, "values", in the weight's shape and dtype, for weights of any rank."""

    dtype: torch.dtype

    @property
    def name(self) -> str:
        return short_dtype(self.dtype)

    @property
    def serves_tables(self) -> bool:
        return True

    def arrays(self, shape: Sequence[int]) -> dict[str, Array]:
        return {"values": Array(tuple(shape), self.dtype, 8 * self.dtype.itemsize)}

    def decode(self, parts: Parts) -> Tensor:
        return parts["values"].to(torch.float32)

    def encode(self, values: Tensor, clip: Tensor | None = None) -> Encoded:
        """Convert values [..]. clip: ignored."""
        stored = values.to(self.dtype)
        if stored is values:
            return Encoded({"values": stored}, decibels(0.0, 0.0))
        wide = values.to(torch.float64)
        noise = float((stored.to(torch.float64) - wide).square().sum())
        return Encoded({"values": stored}, decibels(float(wide.square().sum()), noise))


F32, BF16, F16, I32 = (Dense(t) for t in (torch.float32, torch.bfloat16, torch.float16, torch.int32))

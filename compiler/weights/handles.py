"""Weights as lazy handles: a shape, a dtype and a way to get the values, which no one holds on to.

A pass that needs values calls `load`; passes that only move or combine weights wrap handles in handles, so that a
compile streams and its peak memory is a few times its largest layer.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor


class Weight(ABC):
    """A constant of the graph. `shape` and `dtype` describe what `load` returns."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @abstractmethod
    def load(self) -> Tensor:
        """Read or compute the values; the caller must not modify the result."""

    def describe(self) -> str:
        """The type as the printer shows it, such as bf16[64, 32]."""
        return f"{short_dtype(self.dtype)}[{', '.join(map(str, self.shape))}]"


@dataclass
class Constant(Weight):
    """A value that the trace or a pass made; small."""

    value: Tensor
    shape: tuple[int, ...] = field(init=False)
    dtype: torch.dtype = field(init=False)

    def __post_init__(self) -> None:
        self.shape, self.dtype = tuple(self.value.shape), self.value.dtype

    def load(self) -> Tensor:
        return self.value


@dataclass
class Derived(Weight):
    """`fn` of other weights, computed at every load. `sources` lets passes see what a value is made of."""

    fn: Callable[..., Tensor]
    sources: tuple[Weight, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype

    def load(self) -> Tensor:
        value = self.fn(*(source.load() for source in self.sources))
        assert tuple(value.shape) == self.shape, f"derived weight has shape {tuple(value.shape)}, not {self.shape}"
        return value


def derive(fn: Callable[..., Tensor], *sources: Weight) -> Derived:
    """Derived weight whose shape and dtype come from running `fn` on meta tensors."""
    meta = fn(*(torch.empty(s.shape, dtype=s.dtype, device="meta") for s in sources))
    return Derived(fn, sources, tuple(meta.shape), meta.dtype)


@dataclass(frozen=True)
class QuantParts:
    """A quantized matrix: codes uint8 [..., N, K]; scales float32 (fp16 values) and zeros uint8 [..., N, K / group]."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor

    def dequantize(self) -> Tensor:
        """(codes - zeros) * scales, float32."""
        grouped = self.codes.unflatten(-1, (self.scales.shape[-1], -1)).to(torch.float32)
        return ((grouped - self.zeros.unsqueeze(-1)) * self.scales.unsqueeze(-1)).flatten(-2)


class QuantizedWeight(Weight):
    """A weight stored as `bits`-bit codes with one scale and zero point per `group` values along K, the last axis.

    `snr_db` is the signal-to-noise ratio of the stored values; None until `parts` has run, unless known before.
    """

    bits: int
    group: int
    snr_db: float | None = None

    @abstractmethod
    def parts(self) -> QuantParts:
        """Codes, scales and zero points."""

    def load(self) -> Tensor:
        return self.parts().dequantize()

    def describe(self) -> str:
        return f"q{self.bits}g{self.group}[{', '.join(map(str, self.shape))}]"


@dataclass
class RoundedWeight(QuantizedWeight):
    """`source` rounded to nearest at every `parts`; `clip` [..., N, K / group] bounds each group's range
    to that part of its largest magnitude."""

    source: Weight
    bits: int
    group: int
    clip: Tensor | None = None
    shape: tuple[int, ...] = field(init=False)
    dtype: torch.dtype = field(init=False, default=torch.float32)
    snr_db: float | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.shape = self.source.shape

    def parts(self) -> QuantParts:
        parts, self.snr_db = round_to_groups(self.source.load(), self.bits, self.group, self.clip)
        return parts


@dataclass
class PackedWeight(QuantizedWeight):
    """Codes that a pass computed; 4-bit codes are held two to a byte."""

    held: QuantParts
    bits: int
    group: int
    shape: tuple[int, ...]
    snr_db: float | None = None
    dtype: torch.dtype = field(init=False, default=torch.float32)

    @classmethod
    def pack(cls, parts: QuantParts, bits: int, group: int, snr_db: float | None = None) -> PackedWeight:
        """Take over `parts`."""
        shape, codes = tuple(parts.codes.shape), parts.codes
        if bits == 4:
            codes = codes[..., 0::2] | (codes[..., 1::2] << 4)
        held = QuantParts(codes, parts.scales.to(torch.float16), parts.zeros)
        return cls(held, bits, group, shape, snr_db)

    def parts(self) -> QuantParts:
        codes = self.held.codes
        if self.bits == 4:
            codes = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
        return QuantParts(codes, self.held.scales.to(torch.float32), self.held.zeros)


@dataclass
class RowConcat(Weight):
    """Weights of one dtype joined along their output axis, the first of a vector or matrix, such as merged QKV."""

    parts: tuple[Weight, ...]
    shape: tuple[int, ...] = field(init=False)
    dtype: torch.dtype = field(init=False)

    def __post_init__(self) -> None:
        first = self.parts[0]
        assert all(p.shape[1:] == first.shape[1:] and p.dtype == first.dtype for p in self.parts), "rows differ"
        self.shape, self.dtype = (sum(p.shape[0] for p in self.parts), *first.shape[1:]), first.dtype

    def load(self) -> Tensor:
        return torch.cat([part.load() for part in self.parts])

    def describe(self) -> str:
        names = {p.describe().split("[")[0] for p in self.parts}
        return f"{'+'.join(sorted(names))}[{', '.join(map(str, self.shape))}]"


def quant_parts(weight: Weight) -> QuantParts | None:
    """The parts of a quantized weight, or of a RowConcat of weights quantized alike; None for all others."""
    if isinstance(weight, QuantizedWeight):
        return weight.parts()
    if not isinstance(weight, RowConcat):
        return None
    found = [part for part in weight.parts if isinstance(part, QuantizedWeight)]
    if len(found) < len(weight.parts) or len({(part.bits, part.group) for part in found}) > 1:
        return None
    parts = [part.parts() for part in found]
    return QuantParts(
        torch.cat([p.codes for p in parts]), torch.cat([p.scales for p in parts]), torch.cat([p.zeros for p in parts])
    )


# rows are rounded in blocks of this many values, so that temporaries stay small beside the largest weight
_BLOCK = 1 << 22
_FP16_MAX, _FP16_TINY = 65504.0, 2.0**-24


def group_range(groups: Tensor, bits: int, clip: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(scale, zero point) [...] of groups [..., group]: asymmetric, zero always representable, scale an fp16 value."""
    low, high = groups.amin(-1).clamp(max=0.0), groups.amax(-1).clamp(min=0.0)
    if clip is not None:
        bound = torch.maximum(-low, high) * clip
        low, high = torch.maximum(low, -bound), torch.minimum(high, bound)
    top = 2**bits - 1
    scale = ((high - low) / top).clamp(_FP16_TINY, _FP16_MAX).to(torch.float16).to(torch.float32)
    return scale, torch.round(-low / scale).clamp(0, top)


def round_to_groups(weight: Tensor, bits: int, group: int, clip: Tensor | None = None) -> tuple[QuantParts, float]:
    """Round `weight` [..., K] to nearest with a scale and a zero point per group; also gives the SNR in dB."""
    count = weight.shape[-1] // group
    rows = weight.reshape(-1, count, group)
    clips = None if clip is None else clip.reshape(-1, count)
    codes = torch.empty(rows.shape, dtype=torch.uint8)
    scales = torch.empty(rows.shape[:2])
    zeros = torch.empty(rows.shape[:2], dtype=torch.uint8)
    signal = noise = 0.0
    step = max(1, _BLOCK // weight.shape[-1])
    for start in range(0, len(rows), step):
        here = slice(start, start + step)
        values = rows[here].to(torch.float32)
        scale, zero = group_range(values, bits, None if clips is None else clips[here].to(torch.float32))
        code = torch.round(values / scale[..., None]).add_(zero[..., None]).clamp_(0, 2**bits - 1)
        signal += float(values.square().sum(dtype=torch.float64))
        noise += float((values - (code - zero[..., None]) * scale[..., None]).square_().sum(dtype=torch.float64))
        codes[here], scales[here], zeros[here] = code.to(torch.uint8), scale, zero.to(torch.uint8)
    lead = weight.shape[:-1]
    parts = QuantParts(codes.reshape(weight.shape), scales.reshape(*lead, count), zeros.reshape(*lead, count))
    return parts, decibels(signal, noise)


def decibels(signal: float, noise: float) -> float:
    """10 log10(signal / noise), at most 200: an exact copy, or nothing to copy, has no noise."""
    return min(200.0, 10.0 * math.log10(signal / noise)) if noise > 0 and signal > 0 else 200.0


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
    """f32, bf16, ...: the name used in graph text and program files."""
    return _SHORT.get(dtype, str(dtype).removeprefix("torch."))

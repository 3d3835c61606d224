"""Codes of the KV formats and their values, as kernels write and read them: the reference in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from .hadamard import walsh_hadamard

MIXED_BLOCK = 64  # elements that are mixed together, if a vector has so many
FLOATS = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
_LEAST = 1e-30
_E4M3_TOP, _E4M3_UNIT = 448.0, 256.0


def int8_codes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes int8 [..., dim] and float32 scales [..., 1]."""
    peak = _peak(x)
    return torch.round(x * (127 / peak.clamp(min=_LEAST))).to(torch.int8), peak / 127


def e4m3_codes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Bytes of e4m3 [..., dim] and float32 scales [..., 1], which multiply 2^-8 of the bytes' values."""
    peak = _peak(x)
    codes = (x * (_E4M3_TOP / peak.clamp(min=_LEAST))).to(torch.float8_e4m3fn)
    return codes.view(torch.uint8), peak / _E4M3_TOP * _E4M3_UNIT


def e4m3_values(codes: Tensor, scales: Tensor) -> Tensor:
    """Inverse of `e4m3_codes`, float32 [..., dim]."""
    return codes.view(torch.float8_e4m3fn).to(torch.float32) * (scales / _E4M3_UNIT)


def mixed_codes(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Bytes [..., dim * bits / 8, rounded up], from the low bits up, and float16 steps and centres [..., 2]."""
    y, each, top = _mix(x), 8 // bits, 2**bits - 1
    low, high, mean = y.amin(-1, keepdim=True), y.amax(-1, keepdim=True), y.mean(-1, keepdim=True)
    centre = (low + high) / 2 if bits == 4 else mean
    deviation = (y - mean).square().mean(-1, keepdim=True).sqrt()
    unit = (high - low) / 2 / top if bits == 4 else 0.498 * deviation  # the best for normal values
    span = torch.cat([unit, centre], -1).to(torch.float16)
    unit, centre = span.to(torch.float32).split(1, dim=-1)
    codes = torch.floor((y - centre) / (2 * unit.clamp(min=_LEAST))) + (top + 1) // 2
    codes = torch.nn.functional.pad(codes.clamp(0, top), (0, -x.shape[-1] % each)).to(torch.int32)
    fields = codes.unflatten(-1, (-1, each)) << bits * torch.arange(each)
    return fields.sum(-1).to(torch.uint8), span


def mixed_values(codes: Tensor, span: Tensor, bits: int, dim: int) -> Tensor:
    """Inverse of `mixed_codes`, float32 [..., dim]."""
    top = 2**bits - 1
    fields = (codes.to(torch.int32).unsqueeze(-1) >> bits * torch.arange(8 // bits)) & top
    unit, centre = span.to(torch.float32).split(1, dim=-1)
    return _mix((2 * fields.flatten(-2)[..., :dim].to(torch.float32) - top) * unit + centre)


def _peak(x: Tensor) -> Tensor:
    return x.abs().amax(-1, keepdim=True)


def _mix(x: Tensor) -> Tensor:
    """The transform of every 64 elements, and of powers of two for the rest; its own inverse."""
    sizes, rest, size = [], x.shape[-1], MIXED_BLOCK
    while rest:
        while size > rest:
            size //= 2
        sizes.append(size)
        rest -= size
    return torch.cat([walsh_hadamard(part) for part in x.split(sizes, dim=-1)], dim=-1)

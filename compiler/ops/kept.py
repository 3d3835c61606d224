"""What a KV cache keeps of keys and values, as kernels write and read them: the reference of every type."""

from __future__ import annotations

import torch
from torch import Tensor

from .hadamard import walsh_hadamard

MIXED_BLOCK = 64  # elements that are mixed together, as far as there are so many
_FLOATS = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
_LEAST = 1e-30


def kept(x: Tensor, dtype: str) -> Tensor:
    """The values float32 [..., dim] that a cache of `dtype` (KV_DTYPES of runtime/format/kv.py) holds of vectors x.

    i8 and f8 (e4m3) have a float32 scale per vector; i4 and i2 are codes about a centre of the vector's Walsh-Hadamard
    transform (QuaRot, Ashkboos et al. 2024), with a float16 step and centre.
    """
    x = x.to(torch.float32)
    if dtype in _FLOATS:
        return x.to(_FLOATS[dtype]).to(torch.float32)
    peak = x.abs().amax(-1, keepdim=True)
    if dtype == "i8":
        return torch.round(x * (127 / peak.clamp(min=_LEAST))) * (peak / 127)
    if dtype == "f8":
        scaled = x * (448 / peak.clamp(min=_LEAST))
        return scaled.to(torch.float8_e4m3fn).to(torch.float32) * (peak / 448)
    return _mix(_coded(_mix(x), dtype))


def _coded(y: Tensor, dtype: str) -> Tensor:
    bits = int(dtype[1:])
    top = 2**bits - 1
    low, high, mean = y.amin(-1, keepdim=True), y.amax(-1, keepdim=True), y.mean(-1, keepdim=True)
    centre = (low + high) / 2 if bits == 4 else mean
    deviation = (y - mean).square().mean(-1, keepdim=True).sqrt()
    unit = (high - low) / 2 / top if bits == 4 else 0.498 * deviation  # of 2 bits, what loses least of a normal one
    unit, centre = unit.to(torch.float16).to(torch.float32), centre.to(torch.float16).to(torch.float32)
    codes = torch.floor((y - centre) / (2 * unit.clamp(min=_LEAST))) + (top + 1) // 2
    return (2 * codes.clamp(0, top) - top) * unit + centre


def _mix(x: Tensor) -> Tensor:
    """The transform of every 64 elements, and of the powers of two that the rest is a sum of; its own inverse."""
    sizes, rest, size = [], x.shape[-1], MIXED_BLOCK
    while rest:
        while size > rest:
            size //= 2
        sizes.append(size)
        rest -= size
    return torch.cat([walsh_hadamard(part) for part in x.split(sizes, dim=-1)], dim=-1)

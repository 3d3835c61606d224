"""bf16 values in numpy, as their bits, uint16."""

from __future__ import annotations

import numpy as np


def bf16_bits(array: np.ndarray) -> np.ndarray:
    """float32 of any shape -> uint16 bf16 bits of that shape, rounded to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    rounded = bits >> 16  # in place from here on, because many megabytes of an adapter may be converted while steps run
    rounded &= 1
    rounded += bits
    rounded += np.uint32(0x7FFF)
    rounded >>= 16
    found = rounded.astype(np.uint16)
    if (missing := np.isnan(array)).any():
        found[missing] = (bits[missing] >> 16).astype(np.uint16) | np.uint16(64)
    return found


def bf16_values(bits: np.ndarray) -> np.ndarray:
    """uint16 bf16 bits of any shape -> float32 of that shape."""
    return (bits.astype(np.uint32) << 16).view(np.float32)

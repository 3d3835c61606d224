"""bf16 values as numpy has them: their bits, uint16."""

from __future__ import annotations

import numpy as np


def bf16_bits(array: np.ndarray) -> np.ndarray:
    """float32 -> uint16 bf16 bits, rounded to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) >> 16).astype(np.uint16)
    return np.where(np.isnan(array), (bits >> 16).astype(np.uint16) | np.uint16(64), rounded)


def bf16_values(bits: np.ndarray) -> np.ndarray:
    """uint16 bf16 bits -> float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)

"""The types in which the scales of blocks are stored, in the layouts of both back ends."""

from __future__ import annotations

import numpy as np

from .....runtime.format.bfloat16 import bf16_bits, bf16_values

SCALE_BYTES = {"f16": 2, "bf16": 2, "f32": 4, "e8m0": 1}
SCALE_TYPES = {"f16": np.float16, "bf16": np.uint16, "f32": np.float32}


def stored_scales(scales: np.ndarray, kind: str) -> np.ndarray:
    """float32 scales of any shape in the type that they are stored in; bf16 as bits."""
    return bf16_bits(scales) if kind == "bf16" else scales.astype(SCALE_TYPES[kind])


def scale_values(stored: np.ndarray) -> np.ndarray:
    """Inverse of `stored_scales`, of any shape."""
    return bf16_values(stored) if stored.dtype == np.uint16 else stored.astype(np.float32)

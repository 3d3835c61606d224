"""The values behind a weight of a program, as numpy arrays for packing."""

from __future__ import annotations

import numpy as np
import torch

from ..program.builder import WeightSource
from ..weights.handles import quant_parts


def dense_values(source: WeightSource) -> np.ndarray:
    """A dense weight in a type that numpy has: bf16 comes as its bits, uint16; float64 as float32."""
    value = source.handle.load()
    if source.format in ("f32", "i32"):
        value = value.to(torch.float32 if source.format == "f32" else torch.int32)
    elif value.dtype == torch.float64:
        value = value.to(torch.float32)
    value = value.contiguous()
    return value.view(torch.uint16).numpy() if value.dtype == torch.bfloat16 else value.numpy()


def quantized_values(source: WeightSource) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes uint8 `[..., N, K]`, scales float32 and zero points uint8 `[..., N, K / group]`."""
    parts = quant_parts(source.handle)
    assert parts is not None
    return parts.codes.numpy(), parts.scales.numpy(), parts.zeros.numpy()

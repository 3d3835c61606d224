"""The parts of a weight of a program, as numpy arrays for packing."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..program.builder import WeightSource
from ..weights.formats.dense import Dense


def source_parts(source: WeightSource) -> dict[str, np.ndarray]:
    """The arrays that a weight's layout packs: the stored parts if the weight is stored in the layout's format, else
    its values encoded in it."""
    form, handle = source.layout.format, source.handle
    if handle.storage == form:
        parts = handle.parts()
    elif isinstance(form, Dense):
        parts = {"values": handle.load().to(form.dtype)}
    else:
        parts = form.encode(handle.load()).parts
    return {name: _numpy(value) for name, value in parts.items()}


def _numpy(value: Tensor) -> np.ndarray:
    """The tensor as an array of the same shape; bf16 as its bits, uint16."""
    value = value.contiguous()
    return value.view(torch.uint16).numpy() if value.dtype == torch.bfloat16 else value.numpy()


def pack(source: WeightSource) -> np.ndarray:
    """The packed bytes of one weight, uint8 [nbytes]."""
    return source.layout.pack(source_parts(source))

"""The ops that a graph may hold: icc's own (registered with torch as `torch.ops.icc.<name>`) and those of aten.

Another package's ops are found through its entry points (see docs/extending.md) or declared where they are imported.
"""

from . import (
    aten,
    attention,
    convolution,
    embedding,
    hadamard,
    linear,
    moves,
    norm,
    pointwise,
    rowwise,
    scan,
    selecting,
)
from .base import OPS, Cost, Op, op, op_of, tensor_bytes, traits_of
from .traits import Traits

__all__ = [
    "OPS",
    "Cost",
    "Op",
    "Traits",
    "aten",
    "attention",
    "convolution",
    "embedding",
    "hadamard",
    "linear",
    "moves",
    "norm",
    "op",
    "op_of",
    "pointwise",
    "rowwise",
    "scan",
    "selecting",
    "tensor_bytes",
    "traits_of",
]

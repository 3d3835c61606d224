"""The ops that a graph may hold: icc's own (registered with torch as `torch.ops.icc.<name>`) and those of aten.

Another package's ops are found through its entry points (see docs/extending.md) or declared where they are imported.
"""

from . import (
    aten,
    attention,
    collective,
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
from .attention_spec import AttentionMask, AttentionSpec
from .base import OPS, Cost, Op, named_arguments, op, op_of, tensor_bytes, traits_of
from .traits import Division, Traits

__all__ = [
    "OPS",
    "AttentionMask",
    "AttentionSpec",
    "Cost",
    "Division",
    "Op",
    "Traits",
    "aten",
    "attention",
    "collective",
    "convolution",
    "embedding",
    "hadamard",
    "linear",
    "moves",
    "named_arguments",
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

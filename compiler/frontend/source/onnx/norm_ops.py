"""Handlers of norms, and of norms with ops that optimizers fused into them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .errors import Refused
from .table import OnnxCall, Table

HANDLERS = Table()


def _optional(c: OnnxCall, index: int) -> Tensor | None:
    return None if c.given(index) is None else c.tensor(index)


@HANDLERS.handles("LayerNormalization")
def layer_norm(c: OnnxCall) -> Any:
    """LayerNormalization over the last axis; Refused over several."""
    value = c.tensor(0)
    if c.attribute("axis", -1) % value.dim() != value.dim() - 1:
        raise Refused("a norm over several axes")
    width = value.shape[-1]
    return functional.layer_norm(value, (width,), c.tensor(1), _optional(c, 2), c.attribute("epsilon", 1e-5))


@HANDLERS.handles("com.microsoft.EmbedLayerNormalization")
def embedding_norm(c: OnnxCall) -> Any:
    """onnxruntime's EmbedLayerNormalization: the norm of the sum of rows of three tables.

    (ids, segments, word table, position table, segment table, scale, bias, mask, positions) -> (norm, number of tokens
    that are no padding, sum).
    """
    ids = c.tensor(0)
    places = torch.arange(ids.shape[1], device=c.device)[None] if c.given(8) is None else c.tensor(8)
    total = functional.embedding(ids, c.tensor(2)) + functional.embedding(places, c.tensor(3))
    if c.given(1) is not None and c.given(4) is not None:
        total = total + functional.embedding(c.tensor(1), c.tensor(4))
    norm = functional.layer_norm(total, (total.shape[-1],), c.tensor(5), c.tensor(6), c.attribute("epsilon", 1e-12))
    counted = torch.zeros_like(ids[:, 0]) if c.given(7) is None else c.tensor(7).sum(-1)
    return [norm, counted, total]


@HANDLERS.handles("RMSNormalization", "SimplifiedLayerNormalization")
def rms_norm(c: OnnxCall) -> Any:
    """RMSNormalization over the last axis; Refused over several."""
    value = c.tensor(0)
    if c.attribute("axis", -1) % value.dim() != value.dim() - 1:
        raise Refused("a norm over several axes")
    return functional.rms_norm(value, (value.shape[-1],), c.tensor(1), c.attribute("epsilon", 1e-5))


@HANDLERS.handles("com.microsoft.SkipLayerNormalization", "com.microsoft.SkipSimplifiedLayerNormalization")
def skip_norm(c: OnnxCall) -> Any:
    """onnxruntime's norms of a sum -> (norm(input + skip + bias), mean, inverse deviation, input + skip + bias)."""
    simplified = "Simplified" in c.node.op_type
    total = c.tensor(0) + c.tensor(1)
    bias = _optional(c, 3 if simplified else 4)
    total = total if bias is None else total + bias
    eps, width = c.attribute("epsilon", 1e-12), (total.shape[-1],)
    if simplified:
        result = functional.rms_norm(total, width, c.tensor(2), eps)
    else:
        result = functional.layer_norm(total, width, c.tensor(2), _optional(c, 3), eps)
    return [result, None, None, total]

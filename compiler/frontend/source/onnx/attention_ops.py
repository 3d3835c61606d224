"""Handlers of attention and rotary embedding ops: those of ONNX opset 23, and onnxruntime's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .errors import Refused
from .known import Known
from .table import OnnxCall, Table

HANDLERS = Table()


def _heads(x: Tensor, count: int) -> Tensor:
    """[1, T, count * D] or [1, count, T, D] -> [1, count, T, D]."""
    return x if x.dim() == 4 else x.unflatten(-1, (count, -1)).transpose(1, 2)


def _rows(x: Tensor) -> Tensor:
    """[1, H, T, D] -> [1, T, H * D]."""
    return x.transpose(1, 2).flatten(2)


def rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x [1, H, T, D] rotated in its first 2 R values by cos, sin [1, T, R]."""
    half = cos.shape[-1]
    head, tail = x[..., : 2 * half], x[..., 2 * half :]
    if interleaved:
        cos, sin = (v.repeat_interleave(2, dim=-1) for v in (cos, sin))
        turned = torch.stack((-head[..., 1::2], head[..., ::2]), dim=-1).flatten(-2)
    else:
        cos, sin = (torch.cat((v, v), dim=-1) for v in (cos, sin))
        turned = torch.cat((-head[..., half:], head[..., :half]), dim=-1)
    done = head * cos.unsqueeze(1) + turned * sin.unsqueeze(1)
    return torch.cat((done, tail), dim=-1) if tail.shape[-1] else done


def _angles(c: OnnxCall, cos: Any, sin: Any, positions: Tensor | None, tokens: Any) -> tuple[Tensor, Tensor]:
    """cos and sin [1, T, R]: rows of tables [positions, R], or the tables themselves if they are [1, T, R] already.
    positions: [1, T]; None: 0 to `tokens` - 1."""
    tables = c.as_tensor(cos), c.as_tensor(sin)
    if tables[0].dim() == 3:
        return tables
    if positions is None:
        positions = torch.arange(tokens, device=c.device)[None]
    return tuple(functional.embedding(positions, table) for table in tables)  # type: ignore[return-value]


@HANDLERS.handles("RotaryEmbedding")
def rotary(c: OnnxCall) -> Any:
    """ONNX's RotaryEmbedding: (x, cos, sin, positions)."""
    return _rotary(c, c.inputs[1], c.inputs[2], c.given(3), "interleaved")


@HANDLERS.handles("com.microsoft.RotaryEmbedding")
def rotary_microsoft(c: OnnxCall) -> Any:
    """onnxruntime's RotaryEmbedding: (x, positions, cos, sin)."""
    if c.attribute("scale", 1.0) != 1.0:
        raise Refused("scaled positions")
    return _rotary(c, c.inputs[2], c.inputs[3], c.given(1), "interleaved")


def _rotary(c: OnnxCall, cos: Any, sin: Any, positions: Any, interleaved: str) -> Tensor:
    value, count = c.tensor(0), c.attribute("num_heads", 0)
    if value.dim() == 3 and not count:
        rows = c.as_tensor(cos).shape[-1]
        count = value.shape[-1] // ((c.attribute("rotary_embedding_dim", 0) and 0) or 2 * rows)
    x = _heads(value, count)
    if isinstance(positions, Known) or (positions is not None and positions.dim() != 2):
        positions = None  # the position of the first token: 0
    angles = _angles(c, cos, sin, positions, x.shape[2])
    done = rotated(x, *angles, bool(c.attribute(interleaved, 0)))
    return done if value.dim() == 4 else _rows(done)


@HANDLERS.handles("com.microsoft.GroupQueryAttention")
def group_query_attention(c: OnnxCall) -> Any:
    """onnxruntime's GroupQueryAttention, which is causal: (query, key, value, past_key, past_value, lengths, total,
    cos, sin, positions, bias, sinks). `query` may hold query, key and value."""
    count, shared = c.attribute("num_heads", 0), c.attribute("kv_num_heads", 0)
    q = c.tensor(0)
    if c.given(1) is None:
        dim = q.shape[-1] // (count + 2 * shared)
        q, k, v = q.split([count * dim, shared * dim, shared * dim], dim=-1)
    else:
        k, v = c.tensor(1), c.tensor(2)
    q, k, v = _heads(q, count), _heads(k, shared), _heads(v, shared)
    if c.given(10) is not None:
        raise Refused("a bias of the attention scores")
    if c.attribute("smooth_softmax", 0) or c.attribute("k_quant_type", "NONE") != "NONE":
        raise Refused("a smooth softmax, or a quantized cache")
    if c.attribute("do_rotary", 0):
        positions = c.given(9) if isinstance(c.given(9), Tensor) else None
        cos, sin = _angles(c, c.given(7), c.given(8), positions, q.shape[2])
        q, k = (rotated(x, cos, sin, bool(c.attribute("rotary_interleaved", 0))) for x in (q, k))
    scale = c.attribute("scale", 0.0) or q.shape[-1] ** -0.5
    window = max(0, c.attribute("local_window_size", -1))
    sinks = c.tensor(11) if c.given(11) is not None else None
    softcap = float(c.attribute("softcap", 0.0))
    out = torch.ops.icc_trace.attention(q, k, v, sinks, float(scale), window, 0, softcap, 0)
    return [out.flatten(2), None, None]


@HANDLERS.handles("com.microsoft.MultiHeadAttention")
def multi_head_attention(c: OnnxCall) -> Any:
    """onnxruntime's MultiHeadAttention: (query, key, value, bias, padding mask, score bias, ...)."""
    count = c.attribute("num_heads", 0)
    if c.given(1) is None or c.given(2) is None:
        raise Refused("packed queries, keys and values")
    q, k, v = (c.tensor(i) for i in range(3))
    if c.given(3) is not None:
        sizes = [q.shape[-1], k.shape[-1], v.shape[-1]]
        q, k, v = (x + b for x, b in zip((q, k, v), c.tensor(3).split(sizes), strict=True))
    q, k, v = (_heads(x, count) for x in (q, k, v))
    _check_padding(c.given(4))
    bias = c.tensor(5) if c.given(5) is not None else None
    causal = bool(c.attribute("unidirectional", 0))
    scale = c.attribute("scale", 0.0) or None
    return [_rows(_attended(q, k, v, bias, causal, scale)), None, None, None]


def _check_padding(mask: Any) -> None:
    """Raise Refused for a mask of another form than [batch] or [batch, tokens], which mask nothing without padding."""
    if mask is not None and (not isinstance(mask, Tensor) or mask.dim() > 2):
        raise Refused("a padding mask of this form")


@HANDLERS.handles("com.microsoft.Attention")
def projected_attention(c: OnnxCall) -> Any:
    """onnxruntime's Attention, which includes the input projections: (x, weight of queries, keys and values [K, 3 N],
    bias, padding mask, past, score bias). Optimizers create it from an encoder's layers."""
    count, weight = c.attribute("num_heads", 0), c.tensor(1)
    if c.given(4) is not None or c.attribute("do_rotary", 0):
        raise Refused("a cache, or positions, inside an attention that projects its own queries")
    _check_padding(c.given(3))
    bias = None if c.given(2) is None else c.tensor(2)
    parts = functional.linear(c.tensor(0), weight.t(), bias)
    sizes = list(c.attribute("qkv_hidden_sizes", ())) or [weight.shape[1] // 3] * 3
    q, k, v = (_heads(x, count) for x in parts.split(sizes, dim=-1))
    scores = None if c.given(5) is None else c.tensor(5)
    out = _attended(q, k, v, scores, bool(c.attribute("unidirectional", 0)), c.attribute("scale", 0.0) or None)
    return [_rows(out), None]


@HANDLERS.handles("Attention")
def attention(c: OnnxCall) -> Any:
    """ONNX's Attention of opset 23: (query, key, value, mask, past_key, past_value)."""
    q, k, v = (c.tensor(i) for i in range(3))
    count, shared = c.attribute("q_num_heads", 0), c.attribute("kv_num_heads", 0)
    rank = q.dim()
    q, k, v = _heads(q, count), _heads(k, shared), _heads(v, shared)
    mask, causal = (None if c.given(3) is None else c.tensor(3)), bool(c.attribute("is_causal", 0))
    scale, softcap = c.attribute("scale", 0.0) or None, float(c.attribute("softcap", 0.0))
    if c.attribute("qk_matmul_output_mode", 0) and len(c.node.output) > 3:
        raise Refused("scores that are handed out")
    if softcap:
        if mask is not None or not causal:
            raise Refused("soft caps with a mask")
        own = scale or q.shape[-1] ** -0.5
        out = torch.ops.icc_trace.attention(q, k, v, None, float(own), 0, 0, softcap, 0).transpose(1, 2)
    else:
        out = _attended(q, k, v, mask, causal, scale)
    return [out if rank == 4 else _rows(out), None, None, None]


def _attended(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None) -> Tensor:
    """scaled_dot_product_attention -> [1, H, T, Dv], not decomposed, so that the frontend can analyse the mask."""
    if causal and mask is None:
        own = scale or q.shape[-1] ** -0.5
        return torch.ops.icc_trace.attention(q, k, v, None, float(own), 0, 0, 0.0, 0).transpose(1, 2)
    if causal and mask is not None:
        raise Refused("causal attention with a mask besides")
    if (times := q.shape[1] // k.shape[1]) > 1:  # keys repeated for the query heads that share them, as models do
        k, v = (x.unsqueeze(2).expand(-1, -1, times, -1, -1).flatten(1, 2) for x in (k, v))
    return functional.scaled_dot_product_attention(q, k, v, mask, scale=scale)

"""Attention that a model writes out as softmax(q k^T * scale + bias) v, recognised by data flow.

A product of two per-token values over pairs of tokens becomes `AttentionScores`; the operations before the softmax are
recorded, and the product of the probabilities with the values emits one attention op.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ...graph.tensor_types import type_of
from ...ops import OPS
from .attending import emit_attention
from .broadcasting import per_token
from .conversion import Conversion
from .masks import Mask, MaskStep, analyse
from .row_bias import pair_dims
from .scores import AttentionScores, arithmetic, is_static, permuted, refuse_dynamic, reshaped, with_bias
from .values import Dims, T, TracedValue, dims_of, op_name

_SAME = ("clone", "dropout", "alias", "detach", "contiguous", "_to_copy", "to", "convert_element_type", "expand")
_RESHAPES = ("view", "reshape", "_unsafe_view", "unsqueeze", "squeeze", "flatten")
_PRODUCTS = ("matmul", "bmm", "baddbmm")


def _is_pair_product(a: TracedValue, b: TracedValue) -> bool:
    if not (a.per_token and b.per_token and len(a.dims) >= 3 and len(b.dims) >= 3):
        return False
    return a.dims[-2] is T and b.dims[-1] is T and a.dims[-1] == b.dims[-2]


def _kv_heads(q: Dims, kv: Dims) -> int:
    """The number of heads of `kv`. Its leading dims must be those of `q`, the trailing ones broadcast."""
    lead_q = [d for d in q if d != 1]
    padded = [*(1,) * (len(q) - len(kv)), *kv]
    lead_kv = [d for d, of in zip(padded, q, strict=True) if of != 1]
    same = next((i for i, (a, b) in enumerate(zip(lead_q, lead_kv, strict=True)) if a != b), len(lead_q))
    if any(d != 1 for d in lead_kv[same:]):
        raise ValueError("heads that share keys in another way than by groups")
    return math.prod(lead_kv[:same])


def _unrepeated(conv: Conversion, value: TracedValue, dim: int, heads: int) -> TracedValue | None:
    """Keys or values before their heads were repeated for the query groups, as (heads, T, dim); None if they were not.
    A cache of the repeated heads would be that many times larger."""
    aten, node = torch.ops.aten, value.node
    while isinstance(node, fx.Node) and node.target is aten.view.default:
        node = node.args[0]
    if not isinstance(node, fx.Node) or node.target is not aten.expand.default:
        return None
    source = node.args[0]
    assert isinstance(source, fx.Node)
    before, after = type_of(source).shape, type_of(node).shape
    grown = [i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
    if (
        len(grown) != 1
        or len(before) != len(after)
        or after[grown[0] + 1 :] != (dim,)
        or math.prod(after[:-1]) != heads
    ):
        return None
    own = math.prod(before[: grown[0]])
    return conv.view(TracedValue(source, (*before[:-1], T, dim)), (own, T, dim))


def _unscaled(conv: Conversion, value: TracedValue) -> tuple[TracedValue, float]:
    """Queries or keys before a multiplication by constant numbers, and the product of these, which scales the scores
    instead."""
    aten, node, factor = torch.ops.aten, value.node, 1.0
    source = node
    while node.target in (aten.view.default, aten.mul.Tensor) and isinstance(before := node.args[0], fx.Node):
        if node.target is aten.mul.Tensor:
            if not isinstance(node.args[1], (int, float)):
                break
            factor, source = factor * node.args[1], before
        node = before
    if source is value.node:
        return value, 1.0
    own = TracedValue(source, (T, *type_of(source).shape))
    return TracedValue(conv.view(own, (T, *value.features)).node, value.dims), factor


def mask_free(options: dict[str, Any]) -> bool:
    """Whether the options of torch's attention function mask nothing."""
    return options.get("attn_mask") is None and not options.get("is_causal")


def _is_within_token(value: TracedValue) -> bool:
    return value.axis is None or value.axis < len(value.dims) - 2


def within_token(conv: Conversion, operands: tuple[TracedValue, ...], dims: Dims, scale: Any) -> TracedValue:
    """Attention within each token, over its own rows [.., M, D]: two products with a softmax between them."""
    aten = torch.ops.aten
    lead = tuple(dims[:-2])
    q, k, v = (per_token(conv, value, (*lead, *value.dims[-2:])).node for value in operands)
    swapped = [*range(len(lead)), len(lead) + 1, len(lead)]
    scores = conv.emit(OPS["bmm"].overload, q, conv.emit(aten.permute.default, k, swapped))
    factor = operands[0].dims[-1] ** -0.5 if scale is None else float(scale)
    weights = conv.emit(OPS["softmax"].overload, conv.emit(aten.mul.Tensor, scores, factor))
    return TracedValue(conv.emit(OPS["bmm"].overload, weights, v), dims)


class WrittenOutAttention:
    """The CallFollower of attention that a model writes out, or calls as torch's own function."""

    def __init__(self) -> None:
        self._masks: dict[tuple[tuple[MaskStep, ...], int], Mask] = {}  # most layers have the same mask

    def follow(self, conv: Conversion, node: fx.Node) -> Any:
        """The AttentionScores or the attention's TracedValue for a node of a written-out attention; None for any other
        node.

        Raises ValueError with the reason if the attention has a form that cannot be compiled.
        """
        short = op_name(node.target).split(".")[-1]
        inputs = [conv.values.get(a) for a in node.all_input_nodes]
        if short == "scaled_dot_product_attention":
            return self._whole(conv, node)
        if any(isinstance(i, AttentionScores) for i in inputs):
            return self._follow(conv, node, short)
        if short in _PRODUCTS:
            operands = node.args[1:3] if short == "baddbmm" else node.args[:2]
            a, b = (conv.values.get(o) for o in operands)  # type: ignore[arg-type]
            if isinstance(a, TracedValue) and isinstance(b, TracedValue) and _is_pair_product(a, b):
                scores = AttentionScores(a, b, pair_dims(node.meta["val"]))
                return with_bias(conv, scores, node) if short == "baddbmm" else scores
        return None

    def _follow(self, conv: Conversion, node: fx.Node, short: str) -> Any:
        scores = next(v for a in node.all_input_nodes if isinstance(v := conv.values.get(a), AttentionScores))
        if scores.order and short not in (*_RESHAPES, *_SAME, "permute"):
            raise ValueError("attention scores in another order")
        if scores.probabilities and short in _PRODUCTS:
            return self._attend(conv, node, scores)
        if short == "permute":
            return permuted(scores, node)
        if short in _RESHAPES or short in _SAME:
            return reshaped(scores, pair_dims(node.meta["val"]))
        if short in ("_softmax", "softmax", "_safe_softmax") and not scores.probabilities:
            if int(node.args[1]) % len(scores.dims) != len(scores.dims) - 1:  # type: ignore[arg-type]
                raise ValueError("a softmax over the queries")
            return replace(scores, probabilities=True)
        if scores.probabilities:
            raise ValueError("arithmetic with attention probabilities")
        return arithmetic(conv, node, short, scores)

    def _whole(self, conv: Conversion, node: fx.Node) -> TracedValue | None:
        """torch's own scaled_dot_product_attention(q, k, v, mask, dropout, is_causal)."""
        found = [conv.values.get(a) for a in node.args[:3]]  # type: ignore[arg-type]
        operands = [o for o in found if isinstance(o, TracedValue)]
        if len(operands) != 3:
            return None
        q, k, v = operands
        rest: dict[str, Any] = dict(zip(("attn_mask", "dropout_p", "is_causal"), node.args[3:], strict=False)) | dict(
            node.kwargs
        )
        if mask_free(rest) and all(_is_within_token(value) for value in (q, k, v)):
            return within_token(conv, (q, k, v), dims_of(node.meta["val"]), rest.get("scale"))
        if any(value.axis != len(value.dims) - 2 or not value.per_token for value in (q, k, v)):
            raise ValueError("attention over other axes than tokens")
        scale = rest.get("scale")
        scores = AttentionScores(q, k, (*q.dims[:-2], T, T), float(scale) if scale is not None else q.dims[-1] ** -0.5)
        mask = rest.get("attn_mask")
        if mask is not None:
            if not is_static(conv, mask):
                refuse_dynamic()
            boolean = mask.meta["val"].dtype == torch.bool
            scores = replace(scores, steps=(MaskStep("keep", mask, -math.inf) if boolean else MaskStep("add", mask),))
        heads = (*k.dims[:-2], k.dims[-1], T)
        scores = replace(scores, k=TracedValue(k.node, heads))
        return self._emit(conv, scores, v, dims_of(node.meta["val"]), bool(rest.get("is_causal")))

    def _attend(self, conv: Conversion, node: fx.Node, scores: AttentionScores) -> TracedValue:
        values = conv.values.get(node.args[1])  # type: ignore[arg-type]
        if not isinstance(values, TracedValue) or not values.per_token or values.axis != len(values.dims) - 2:
            raise ValueError("attention probabilities times something other than values")
        if op_name(node.target) == "aten.baddbmm":
            raise ValueError("a bias added to the attended values")
        return self._emit(conv, scores, values, dims_of(node.meta["val"]), False)

    def _emit(self, conv: Conversion, scores: AttentionScores, v: TracedValue, dims: Dims, causal: bool) -> TracedValue:
        (query, of_queries), (key, of_keys) = (_unscaled(conv, value) for value in (scores.q, scores.k))
        scores = replace(scores, q=query, k=key, scale=scores.scale * of_queries * of_keys)
        heads = math.prod(scores.q.dims[:-2])
        shared = _kv_heads(scores.q.dims[:-2], scores.k.dims[:-2])
        if _kv_heads(scores.q.dims[:-2], v.dims[:-2]) != shared:
            raise ValueError("keys and values with different numbers of heads")
        mask = self._mask(conv, scores.steps, heads) if not causal or scores.steps else Mask()
        if causal:
            mask = replace(mask, ahead=0)
        q = conv.view(scores.q, (heads, T, scores.q.dims[-1])).node
        k, value = _unrepeated(conv, scores.k, scores.k.dims[-2], shared), _unrepeated(conv, v, v.dims[-1], shared)
        if k is None or value is None or k.dims[0] != value.dims[0]:
            k = conv.view(scores.k, (shared, T, scores.k.dims[-2]))
            value = conv.view(v, (shared, T, v.dims[-1]))
        out = emit_attention(conv, (q, k.node, value.node), None, (scores.scale, scores.softcap), mask, scores.by_pair)
        return conv.view(out, dims)

    def _mask(self, conv: Conversion, steps: tuple[MaskStep, ...], heads: int) -> Mask:
        if (steps, heads) not in self._masks:
            self._masks[steps, heads] = analyse(conv.static, conv.max_tokens, steps, heads)
        return self._masks[steps, heads]

"""Attention that a model writes out as softmax(q k^T * scale + bias) v, recognised by data flow.

A product of two per-token values over pairs of tokens becomes a `Scores`; what happens to it before its softmax is
recorded, and the product of the probabilities with the values emits one attention op. What was added or masked is
then computed for a number of tokens and must turn out to be causal (with a window or chunks), plus ALiBi at most.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from ...graph.graph import type_of
from ...ops import OPS
from ...ops.attention import visible
from .static_values import StaticValues
from .token_major import Dims, Lowering, T, Value, dims_of, op_name, pattern

MASKED = -9000.0  # exp(-9000) is 0 in float32 next to any ordinary score
_LARGEST_TABLE = 4096  # tokens for which a mask is computed, to find out what it is
_SMALL_TABLE = 48
_MAX_ELEMENTS = 2**26

_SAME = ("clone", "dropout", "alias", "detach", "contiguous", "_to_copy", "to", "convert_element_type", "expand")
_RESHAPES = ("view", "reshape", "_unsafe_view", "unsqueeze", "squeeze", "flatten")
_PRODUCTS = ("matmul", "bmm", "baddbmm")


@dataclass(frozen=True)
class Step:
    """One thing done to the scores: add, mul (a 0/1 table), keep (where true), mask (where true) or view."""

    kind: str
    operand: Any  # a static node, a number, or the new dims of a view
    fill: Any = None  # what masked places become


@dataclass(frozen=True)
class Scores:
    """scale * q k^T (soft-capped if softcap) with steps applied; `dims` end in (T, T). After softmax: probabilities."""

    q: Value
    k: Value
    dims: tuple[Any, ...]
    scale: float = 1.0
    softcap: float = 0.0
    steps: tuple[Step, ...] = ()
    probabilities: bool = False


def pair_dims(val: Any) -> tuple[Any, ...]:
    """Dims as `dims_of` gives them, where two token axes are allowed."""
    return tuple(T if isinstance(s, torch.SymInt) and not s.node.expr.is_Integer else int(s) for s in val.shape)


@pattern
def attention_step(low: Lowering, node: fx.Node) -> Any:
    """Follow `node` if it is part of a written-out attention: a Scores or the attention's Value, else None.

    Raises ValueError with the reason where the attention has a form that cannot be compiled.
    """
    short = op_name(node.target).split(".")[-1]
    inputs = [low.env.get(a) for a in node.all_input_nodes]
    if short == "scaled_dot_product_attention":
        return _whole(low, node)
    if any(isinstance(i, Scores) for i in inputs):
        return _follow(low, node, short)
    if short in _PRODUCTS:
        operands = node.args[1:3] if short == "baddbmm" else node.args[:2]
        a, b = (low.env.get(o) for o in operands)  # type: ignore[arg-type]
        if isinstance(a, Value) and isinstance(b, Value) and _is_pair_product(a, b):
            scores = Scores(a, b, pair_dims(node.meta["val"]))
            return _with_bias(low, scores, node) if short == "baddbmm" else scores
    return None


def _is_pair_product(a: Value, b: Value) -> bool:
    if not (a.per_token and b.per_token and len(a.dims) >= 3 and len(b.dims) >= 3):
        return False
    return a.dims[-2] is T and b.dims[-1] is T and a.dims[-1] == b.dims[-2]


def _with_bias(low: Lowering, scores: Scores, node: fx.Node) -> Scores:
    beta, alpha = float(node.kwargs.get("beta", 1)), float(node.kwargs.get("alpha", 1))  # type: ignore[arg-type]
    scores = replace(scores, scale=alpha)
    if beta == 0:
        return scores
    steps = (Step("add", node.args[0]),)
    if beta != 1:
        raise ValueError("a scaled bias of the attention scores")
    return replace(scores, steps=steps if _is_static(low, node.args[0]) else _refuse_dynamic())


def _refuse_dynamic() -> Any:
    raise ValueError("attention scores with a bias that depends on the tokens")


def _is_static(low: Lowering, operand: Any) -> bool:
    return not isinstance(operand, fx.Node) or operand in low.static.nodes


def _follow(low: Lowering, node: fx.Node, short: str) -> Any:
    scores = next(v for a in node.all_input_nodes if isinstance(v := low.env.get(a), Scores))
    if scores.probabilities and short in _PRODUCTS:
        return _attend(low, node, scores)
    if short in _RESHAPES or short in _SAME:
        return _reshaped(scores, pair_dims(node.meta["val"]))
    if short in ("_softmax", "softmax", "_safe_softmax") and not scores.probabilities:
        if int(node.args[1]) % len(scores.dims) != len(scores.dims) - 1:  # type: ignore[arg-type]
            raise ValueError("a softmax over the queries")
        return replace(scores, probabilities=True)
    if scores.probabilities:
        raise ValueError("arithmetic with attention probabilities")
    return _arithmetic(low, node, short, scores)


def _reshaped(scores: Scores, dims: tuple[Any, ...]) -> Scores:
    if dims[-2:] != (T, T):
        raise ValueError("attention scores in another order")
    if dims == scores.dims:
        return scores
    return replace(scores, dims=dims, steps=(*scores.steps, Step("view", (scores.dims, dims))))


def _arithmetic(low: Lowering, node: fx.Node, short: str, scores: Scores) -> Scores:
    args = list(node.args)
    at = next(i for i, a in enumerate(args) if isinstance(a, fx.Node) and isinstance(low.env.get(a), Scores))
    others = [a for i, a in enumerate(args) if i != at]
    if not all(_is_static(low, o) for o in others):
        _refuse_dynamic()
    if short == "tanh" and not scores.steps and not scores.softcap:
        return replace(scores, softcap=1.0)
    if short in ("maximum", "clamp_min", "clamp") and len(others) == 1:
        if _number(low, others[0]) > MASKED:
            raise ValueError("clamped attention scores")
        return scores
    if short in ("mul", "div"):
        return _scaled(low, short, at, scores, others[0])
    if short in ("add", "sub") and not node.kwargs:
        if short == "sub":
            raise ValueError("a bias subtracted from attention scores")
        return replace(scores, steps=(*scores.steps, Step("add", others[0])))
    if short == "masked_fill":
        return replace(scores, steps=(*scores.steps, Step("mask", args[1], args[2])))
    if short == "where" and at > 0:
        kind = "keep" if at == 1 else "mask"
        return replace(scores, steps=(*scores.steps, Step(kind, args[0], args[3 - at])))
    raise ValueError(f"{short} of attention scores")


def _number(low: Lowering, operand: Any) -> float:
    """A static operand of one element."""
    if isinstance(operand, fx.Node):
        value = low.static.evaluate(operand, _SMALL_TABLE)
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError("attention scores times a tensor")
        return float(value)
    return float(operand)


def _scaled(low: Lowering, short: str, at: int, scores: Scores, operand: Any) -> Scores:
    if isinstance(operand, fx.Node) and pair_dims(operand.meta["val"])[-2:] == (T, T) and short == "mul":
        return replace(scores, steps=(*scores.steps, Step("mul", operand)))
    factor = _number(low, operand)
    if short == "div":
        if at != 0:
            raise ValueError("a division by attention scores")
        factor = 1 / factor
    steps = scores.steps if not scores.steps else (*scores.steps, Step("mul", factor))
    return replace(scores, scale=scores.scale * factor, softcap=scores.softcap * factor, steps=steps)


def _whole(low: Lowering, node: fx.Node) -> Value | None:
    """torch's own scaled_dot_product_attention(q, k, v, mask, dropout, is_causal)."""
    found = [low.env.get(a) for a in node.args[:3]]  # type: ignore[arg-type]
    operands = [o for o in found if isinstance(o, Value)]
    if len(operands) != 3:
        return None
    q, k, v = operands
    rest: dict[str, Any] = dict(zip(("attn_mask", "dropout_p", "is_causal"), node.args[3:], strict=False)) | dict(
        node.kwargs
    )
    if any(value.axis != len(value.dims) - 2 or not value.per_token for value in (q, k, v)):
        raise ValueError("attention over other axes than tokens")
    scale = rest.get("scale")
    scores = Scores(q, k, (*q.dims[:-2], T, T), float(scale) if scale is not None else q.dims[-1] ** -0.5)
    mask = rest.get("attn_mask")
    if mask is not None:
        if not _is_static(low, mask):
            _refuse_dynamic()
        boolean = mask.meta["val"].dtype == torch.bool
        scores = replace(scores, steps=(Step("keep", mask, -math.inf) if boolean else Step("add", mask),))
    heads = (*k.dims[:-2], k.dims[-1], T)
    scores = replace(scores, k=Value(k.node, heads))
    return _emit(low, scores, v, dims_of(node.meta["val"]), bool(rest.get("is_causal")))


def _attend(low: Lowering, node: fx.Node, scores: Scores) -> Value:
    values = low.env.get(node.args[1])  # type: ignore[arg-type]
    if not isinstance(values, Value) or not values.per_token or values.axis != len(values.dims) - 2:
        raise ValueError("attention probabilities times something other than values")
    if op_name(node.target) == "aten.baddbmm":
        raise ValueError("a bias added to the attended values")
    return _emit(low, scores, values, dims_of(node.meta["val"]), False)


def _emit(low: Lowering, scores: Scores, v: Value, dims: Dims, causal: bool) -> Value:
    heads = math.prod(scores.q.dims[:-2])
    shared = _kv_heads(scores.q.dims[:-2], scores.k.dims[:-2])
    if _kv_heads(scores.q.dims[:-2], v.dims[:-2]) != shared:
        raise ValueError("keys and values with different numbers of heads")
    window, chunk, alibi = 0, 0, None
    if not causal or scores.steps:
        window, chunk, alibi = _analyse(low, scores.steps, heads)
    q = low.view(scores.q, (heads, T, scores.q.dims[-1])).node
    k = low.view(scores.k, (shared, T, scores.k.dims[-2])).node
    value = low.view(v, (shared, T, v.dims[-1])).node
    slopes = low.constant("alibi_slopes", alibi).node if alibi is not None else None
    options = (low.next_layer(), scores.scale, window, chunk, scores.softcap)
    out = low.emit(OPS["attention"].overload, q, k, value, None, slopes, *options)
    return low.view(Value(out, (T, *type_of(out).shape)), dims)


def _kv_heads(q: Dims, kv: Dims) -> int:
    """Heads of kv, whose leading dims must be those of q with trailing ones broadcast."""
    lead_q = [d for d in q if d != 1]
    padded = [*(1,) * (len(q) - len(kv)), *kv]
    lead_kv = [d for d, of in zip(padded, q, strict=True) if of != 1]
    same = next((i for i, (a, b) in enumerate(zip(lead_q, lead_kv, strict=True)) if a != b), len(lead_q))
    if any(d != 1 for d in lead_kv[same:]):
        raise ValueError("heads that share keys in another way than by groups")
    return math.prod(lead_kv[:same])


def _analyse(low: Lowering, steps: tuple[Step, ...], heads: int) -> tuple[int, int, Tensor | None]:
    """(window, chunk, ALiBi slopes) of what `steps` do to the scores."""
    known = low.analysed_masks.get((steps, heads))
    if known is None:
        known = low.analysed_masks[steps, heads] = _find_out(low, steps, heads)
    return known


def _find_out(low: Lowering, steps: tuple[Step, ...], heads: int) -> tuple[int, int, Tensor | None]:
    small = _table(low.static, steps, _SMALL_TABLE)
    per_head = max(1, math.prod(small.shape[:-2]))
    tokens = min(low.max_tokens, _LARGEST_TABLE, int((_MAX_ELEMENTS / per_head) ** 0.5))
    allowed = _table(low.static, steps, tokens) > MASKED
    flat = allowed.reshape(-1, tokens, tokens)
    if not bool((flat == flat[0]).all()):
        raise ValueError("an attention mask that differs between heads")
    window, chunk = _mask_of(flat[0])
    if tokens < low.max_tokens and max(window, chunk) == 0 and tokens < _LARGEST_TABLE // 4:
        raise ValueError("an attention bias that is too large to analyse")
    return window, chunk, _slopes(small, window, chunk, heads)


def _table(static: StaticValues, steps: tuple[Step, ...], tokens: int) -> Tensor:
    """What the scores become where q k^T is 0: [.., T, T], head axes of size 1 where all heads are equal."""
    table = torch.zeros(tokens, tokens)

    def value(operand: Any) -> Any:
        return static.evaluate(operand, tokens) if isinstance(operand, fx.Node) else operand

    for step in steps:
        if step.kind == "add":
            table = table + value(step.operand)
        elif step.kind == "mul":
            table = table * value(step.operand)
        elif step.kind == "view":
            before, after = step.operand
            table = _view(table, before, after, tokens)
        else:
            fill = torch.as_tensor(value(step.fill), dtype=torch.float32)
            where = value(step.operand).to(torch.bool)
            table = torch.where(where, table, fill) if step.kind == "keep" else torch.where(where, fill, table)
    return table


def _view(table: Tensor, before: Dims, after: Dims, tokens: int) -> Tensor:
    if math.prod(table.shape[:-2]) == 1:
        return table.reshape(*(1,) * (len(after) - 2), tokens, tokens)
    full = table.expand(*before[:-2], tokens, tokens)
    return full.reshape(*after[:-2], tokens, tokens)


def _mask_of(allowed: Tensor) -> tuple[int, int]:
    """(window, chunk) of a boolean table over (query, key)."""
    tokens = allowed.shape[0]
    positions = torch.arange(tokens)
    if bool((allowed & (positions[None, :] > positions[:, None])).any()):
        raise ValueError("attention that is bidirectional: the model is an encoder, not a causal decoder")
    seen_by_last = int(allowed[-1].sum())
    lost = (~allowed[:, 0]).nonzero()
    candidates = [(0, 0), (seen_by_last, 0), (0, int(lost[0]) if lost.numel() else 0)]
    for window, chunk in candidates:
        if torch.equal(allowed, visible(positions, window, chunk)):
            return window, chunk
    raise ValueError("an attention mask that is neither causal, sliding-window nor chunked")


def _slopes(table: Tensor, window: int, chunk: int, heads: int) -> Tensor | None:
    """ALiBi slopes per head of an additive table, None if it only masks.

    A softmax does not see what a row has in common, so only differences within a row count.
    """
    tokens = table.shape[-1]
    allowed = visible(torch.arange(tokens), window, chunk)
    flat = table.reshape(-1, tokens, tokens).double()
    relative = flat - flat.diagonal(dim1=1, dim2=2)[:, :, None]
    relative = relative.masked_fill(~allowed, 0.0)
    if float(relative.abs().max()) == 0.0:
        return None
    slopes = -relative[:, 1, 0]
    distance = torch.arange(tokens)[None, :] - torch.arange(tokens)[:, None]
    ideal = (slopes[:, None, None] * distance).masked_fill(~allowed, 0.0)
    if float((relative - ideal).abs().max()) > 1e-5 * max(1.0, float(ideal.abs().max())):
        raise ValueError("a bias of the attention scores that is not linear in the distance")
    return slopes.expand(heads).to(torch.float32).contiguous()

"""Writes attention of a batch of sequences as MatMul, Softmax, MatMul; each mask is computed once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch

from ..ops.attention_spec import ALL_AHEAD, AttentionSpec
from ..ops.selecting import LEFT_OUT
from .builder import Builder


@dataclass(frozen=True)
class Sequences:
    """shape: the name of the shape of the token ids, [batch, tokens], an int64 [2]. length: the name of the number of
    tokens, a scalar."""

    shape: str
    length: str


@dataclass(frozen=True)
class Heads:
    """The attributes and sizes of a call of icc.attention."""

    q: int
    kv: int
    dim: int
    value_dim: int
    spec: AttentionSpec

    @property
    def groups(self) -> int:
        """Query heads per key head."""
        return self.q // self.kv


@dataclass(frozen=True)
class RowBias:
    """rows [T, H, width], added to scores by distance; the first `later` columns are for later keys."""

    rows: str
    width: int
    later: int
    heads: tuple[int, int]  # (key heads, query heads per key head)


@dataclass(frozen=True)
class Extras:
    """Names of further operands, "" if not used: sinks [Hq], alibi slopes [Hq], and a bias [Hq, 2 * centre] by
    distance. row_bias: a bias that depends on the query, [T, Hq, width], or [T, 1, width] for all heads. key_bias: one
    that depends on the key. None: none."""

    sinks: str
    alibi: str
    bias: str
    centre: int
    row_bias: RowBias | None = None
    key_bias: RowBias | None = None


def attention(b: Builder, seq: Sequences, q: str, k: str, v: str, extras: Extras, heads: Heads) -> str:
    """q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, Dv] -> [T, Hq, Dv], as icc.attention has it."""
    # [B, S, Hkv, G, D] -> [B, Hkv, G, S, D]; keys and values have G = 1, which broadcasts
    queries = b.add("Transpose", split(b, seq, q, heads.kv, heads.groups, heads.dim), perm=[0, 2, 3, 1, 4])
    keys = b.add("Transpose", split(b, seq, k, heads.kv, 1, heads.dim), perm=[0, 2, 3, 4, 1])
    values = b.add("Transpose", split(b, seq, v, heads.kv, 1, heads.value_dim), perm=[0, 2, 3, 1, 4])
    scores = b.add("Mul", b.add("MatMul", queries, keys), b.number(heads.spec.scale))
    if heads.spec.softcap:
        capped = b.add("Tanh", b.add("Div", scores, b.number(heads.spec.softcap)))
        scores = b.add("Mul", capped, b.number(heads.spec.softcap))
    if extras.alibi:
        slopes = b.reshape(extras.alibi, heads.kv, heads.groups, 1, 1)
        scores = b.add("Add", scores, b.add("Mul", slopes, b.cast(_distance(b, seq), torch.float32)))
    if extras.bias:
        column = b.add("Add", _distance(b, seq), _int(b, extras.centre))
        by_head = b.reshape(extras.bias, heads.kv, heads.groups, 2 * extras.centre)
        scores = b.add("Add", scores, b.add("Gather", by_head, column, axis=2))
    if extras.row_bias:
        scores = b.add("Add", scores, _by_distance(b, seq, extras.row_bias))
    if extras.key_bias:
        scores = b.add("Add", scores, _by_distance(b, seq, extras.key_bias, of_keys=True))
    if seen := _visible(b, seq, heads):
        scores = b.add("Where", seen, scores, b.number(float("-inf")))
    weights = _with_sinks(b, scores, extras.sinks, heads) if extras.sinks else b.add("Softmax", scores, axis=-1)
    mixed = b.add("Transpose", b.add("MatMul", weights, values), perm=[0, 3, 1, 2, 4])
    return b.reshape(mixed, -1, heads.q, heads.value_dim)


def rotate(b: Builder, x: str, cos: str, sin: str, width: int, dim: int, style: str) -> str:
    """Rotary embedding of the first `width` of `dim` values of x [T, H, D] by cos, sin [T, width]; see icc.rope."""
    cos, sin = b.add("Unsqueeze", cos, b.ints(1)), b.add("Unsqueeze", sin, b.ints(1))
    head = x if width == dim else _part(b, x, 0, width)
    if style == "half":
        half = width // 2
        turned = b.add("Concat", b.add("Neg", _part(b, head, half, width)), _part(b, head, 0, half), axis=-1)
    else:
        odd, even = (b.add("Unsqueeze", _part(b, head, at, width, 2), b.ints(-1)) for at in (1, 0))
        pairs = b.add("Concat", b.add("Neg", odd), even, axis=-1)
        turned = b.add("Reshape", pairs, b.ints(0, 0, width))
    done = b.add("Add", b.add("Mul", head, cos), b.add("Mul", turned, sin))
    return done if width == dim else b.add("Concat", done, _part(b, x, width, dim), axis=-1)


def _part(b: Builder, x: str, start: int, end: int, step: int = 1) -> str:
    return b.add("Slice", x, b.ints(start), b.ints(end), b.ints(-1), b.ints(step))


def split(b: Builder, seq: Sequences, x: str, *inner: int) -> str:
    """Rows of tokens as [batch, tokens, *inner]."""
    shape = b.once(("shape", inner), lambda: b.add("Concat", seq.shape, b.ints(*inner), axis=0), "sequences")
    return b.add("Reshape", x, shape)


def _with_sinks(b: Builder, scores: str, sinks: str, heads: Heads) -> str:
    """The softmax over the scores and one more column without a value."""
    shape = b.add("Concat", b.add("Slice", b.add("Shape", scores), b.ints(0), b.ints(-1)), b.ints(1), axis=0)
    column = b.add("Expand", b.reshape(sinks, heads.kv, heads.groups, 1, 1), shape)
    whole = b.add("Softmax", b.add("Concat", scores, column, axis=-1), axis=-1)
    return b.add("Slice", whole, b.ints(0), b.ints(-1), b.ints(-1))


def _positions(b: Builder, seq: Sequences) -> tuple[str, str]:
    """Positions of queries [S, 1] and of keys [1, S]."""

    def along(axis: int) -> str:
        places = b.once(
            "places",
            lambda: b.add("Range", _int(b, 0), seq.length, _int(b, 1)),
            "mask",
        )
        return b.add("Unsqueeze", places, b.ints(axis))

    return b.once("queries", lambda: along(1), "mask"), b.once("keys", lambda: along(0), "mask")


def _visible(b: Builder, seq: Sequences, heads: Heads) -> str:
    """Boolean [S, S]: which keys a query sees; "" if it sees all."""
    window, chunk, ahead = heads.spec.mask.window, heads.spec.mask.chunk, heads.spec.mask.ahead

    def made() -> str:
        q, k = _positions(b, seq)
        rules = []
        if ahead != ALL_AHEAD:
            rules.append(b.add("LessOrEqual", k, b.add("Add", q, _int(b, ahead)) if ahead else q))
        if window:
            rules.append(b.add("Greater", k, b.add("Sub", q, _int(b, window))))
        if chunk:
            rules.append(b.add("Equal", b.add("Div", q, _int(b, chunk)), b.add("Div", k, _int(b, chunk))))
        return reduce(lambda one, other: b.add("And", one, other), rules) if rules else ""

    return b.once(("visible", window, chunk, ahead), made, "mask")


def _distance(b: Builder, seq: Sequences) -> str:
    """Key position - query position, int64 [S, S]."""

    def made() -> str:
        q, k = _positions(b, seq)
        return b.add("Sub", k, q)

    return b.once("distance", made, "mask")


def choice(b: Builder, seq: Sequences, q: str, k: str, w: str, sizes: tuple[int, int], count: int, width: int) -> str:
    """icc.choose_keys of q [T, H, D], k [T, 1, D] and w [T, H] -> [T, 1, width]. sizes: H and D."""
    heads, dim = sizes
    keys = b.add("Transpose", split(b, seq, k, 1, dim), perm=[0, 2, 3, 1])  # [B, 1, D, S]
    products = b.add("Relu", b.add("MatMul", split(b, seq, q, heads, dim), keys))  # [B, S, H, S]
    scores = b.add("Squeeze", b.add("MatMul", split(b, seq, w, 1, heads), products), b.ints(2))
    queries, places = _positions(b, seq)
    seen = b.add("Where", b.add("LessOrEqual", places, queries), scores, b.number(float("-inf")))
    number = b.reshape(b.add("Min", seq.length, _int(b, count)), 1)
    _, best = b.add("TopK", seen, number, outputs=2, axis=-1)
    nothing = b.add("Mul", b.cast(best, torch.float32), b.number(0.0))
    left = b.add("Expand", b.number(LEFT_OUT), b.add("Shape", scores))
    added = b.add("ScatterElements", left, best, nothing, axis=-1)  # [B, S, S]
    columns = b.add("Unsqueeze", b.add("Range", _int(b, 0), _int(b, width), _int(b, 1)), b.ints(0))
    key = b.add("Sub", queries, columns)  # [S, width]
    there = b.add("GreaterOrEqual", key, _int(b, 0))
    batch = b.add("Slice", seq.shape, b.ints(0), b.ints(1))
    at = b.add("Max", key, _int(b, 0))
    at = b.add("Expand", at, b.add("Concat", batch, b.add("Shape", key), axis=0))
    rows = b.add("Where", there, b.add("GatherElements", added, at, axis=-1), b.number(0.0))
    return b.reshape(rows, -1, 1, width)


def _by_distance(b: Builder, seq: Sequences, bias: RowBias, of_keys: bool = False) -> str:
    """[B, Hkv, G, S, S]: column `later` + query position - key position of the query's row, or of the key's; 0 if there
    is no such column."""
    rows = b.add("Transpose", split(b, seq, bias.rows, *bias.heads, bias.width), perm=[0, 2, 3, 1, 4])
    column = b.add("Sub", _int(b, bias.later), _distance(b, seq))
    if of_keys:
        column = b.add("Transpose", column, perm=[1, 0])
    inside = b.add("Clip", column, _int(b, 0), _int(b, bias.width - 1))
    lead = b.add("Slice", b.add("Shape", rows), b.ints(0), b.ints(-1))
    places = b.add("Expand", inside, b.add("Concat", lead, b.reshape(seq.length, 1), axis=0))
    there = b.add("Equal", column, inside)
    found = b.add("Where", there, b.add("GatherElements", rows, places, axis=-1), b.number(0.0))
    return b.add("Transpose", found, perm=[0, 1, 2, 4, 3]) if of_keys else found


def _int(b: Builder, value: Any) -> str:
    return b.constant(int(value), torch.int64)

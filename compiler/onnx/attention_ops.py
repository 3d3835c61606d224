"""Writes attention, rotary embedding and convolutions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from ..graph.tensor_types import type_of
from ..ops import AttentionSpec, named_arguments
from .attention import Extras, Heads, RowBias, attention, choice, rotate, split
from .writer import Table, Writer

HANDLERS = Table()


@HANDLERS.handles("rope")
def _rope(w: Writer, node: fx.Node) -> str:
    x, cos, sin, style = node.args
    return _rotated(w, x, w.value(cos), w.value(sin), type_of(cos).shape[-1], style)  # type: ignore[arg-type]


def _rotated(w: Writer, x: Any, cos: str, sin: str, width: int, style: Any) -> str:
    return rotate(w.b, w.value(x), cos, sin, width, type_of(x).shape[-1], str(style))


@HANDLERS.handles("attention")
def _attention(w: Writer, node: fx.Node) -> str:
    given = named_arguments(node)
    return _attended(w, given, w.value(given["q"]), w.value(given["k"]))


@HANDLERS.handles("paged_attention")
def _paged_attention(w: Writer, node: fx.Node) -> str:
    given = named_arguments(node)
    at = w.value(given["positions"])

    def turned(name: str) -> str:
        x, cos, sin = (given[key] for key in (name, f"{name}_cos", f"{name}_sin"))
        if cos is None or sin is None:
            return w.value(x)

        def row(table: Any) -> str:  # layers share the tables
            return w.b.once(("row", table.target), lambda: w.rows_of(table, at), "positions")

        return _rotated(w, x, row(cos), row(sin), type_of(cos).shape[-1], given["spec"].rope)

    return _attended(w, given, turned("q"), turned("k"))


def _attended(w: Writer, given: Mapping[str, Any], q: str, k: str) -> str:
    """Attention of q and k, which are rotated already. given: the node's operands and attributes, by name."""
    spec: AttentionSpec = given["spec"]
    (q_heads, dim), (kv_heads, _), (_, value_dim) = (type_of(given[name]).shape for name in ("q", "k", "v"))
    heads = Heads(q_heads, kv_heads, dim, value_dim, spec)
    sinks, alibi, bias = (w.value(given[name]) for name in ("sinks", "alibi", "bias"))
    centre = type_of(given["bias"]).shape[1] // 2 if bias else 0
    of_rows = _row_bias(w, given["row_bias"], spec.later, heads)
    of_keys = _row_bias(w, given["key_bias"], spec.key_later, heads)
    found = Extras(sinks, alibi, bias, centre, of_rows, of_keys)
    return attention(w.b, w.sequences, q, k, w.value(given["v"]), found, heads)


def _row_bias(w: Writer, rows: Any, later: int, heads: Heads) -> RowBias | None:
    if rows is None:
        return None
    own, width = type_of(rows).shape
    return RowBias(w.value(rows), width, later, (1, 1) if own < heads.q else (heads.kv, heads.groups))


@HANDLERS.handles("choose_keys")
def _choose_keys(w: Writer, node: fx.Node) -> str:
    q, k, weights, _, count, width = node.args
    operands = w.value(q), w.value(k), w.value(weights)
    return choice(w.b, w.sequences, *operands, type_of(q).shape, int(count), int(width))  # type: ignore[arg-type]


@HANDLERS.handles("causal_conv")
def _causal_conv(w: Writer, node: fx.Node) -> str:
    """Conv with a group per channel, over each sequence of the batch."""
    x, weight, bias, _ = node.args
    taps, channels = type_of(weight).shape  # type: ignore[arg-type]
    b = w.b
    rows = b.add("Transpose", split(b, w.sequences, w.value(x), channels), perm=[0, 2, 1])
    kernel = b.add("Unsqueeze", b.add("Transpose", w.value(weight), perm=[1, 0]), b.ints(1))
    done = b.add("Conv", rows, kernel, w.value(bias), group=channels, kernel_shape=[taps], pads=[taps - 1, 0])
    return b.reshape(b.add("Transpose", done, perm=[0, 2, 1]), -1, channels)

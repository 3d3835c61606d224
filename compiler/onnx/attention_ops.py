"""How attention, positions and convolutions are written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from ..graph.graph import type_of
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
    q, k, v, sinks, alibi, _, scale, window, chunk, softcap, *rest = node.args
    ahead, biases = _sight(rest)
    return _attended(
        w, (q, k, v), (w.value(q), w.value(k)), (sinks, alibi, *biases), (scale, window, chunk, softcap, ahead)
    )


@HANDLERS.handles("paged_attention")
def _paged_attention(w: Writer, node: fx.Node) -> str:
    q, k, v, positions, q_cos, q_sin, k_cos, k_sin, sinks, alibi, _, scale, window, chunk, softcap, style = node.args[
        :16
    ]
    ahead, biases = _sight(node.args[16:])
    at = w.value(positions)

    def turned(x: Any, cos: Any, sin: Any) -> str:
        if cos is None or sin is None:
            return w.value(x)

        def row(table: Any) -> str:  # layers share the tables
            return w.b.once(("row", table.target), lambda: w.rows_of(table, at), "positions")

        return _rotated(w, x, row(cos), row(sin), type_of(cos).shape[-1], style)

    options = scale, window, chunk, softcap, ahead
    return _attended(w, (q, k, v), (turned(q, q_cos, q_sin), turned(k, k_cos, k_sin)), (sinks, alibi, *biases), options)


def _sight(given: Sequence[Any]) -> tuple[int, tuple[Any, ...]]:
    """How many later keys are seen; the bias by distance, that of each query, and its columns for later keys, and the
    same two of each key."""
    ahead, bias, *by_rows = [*given, *(0, None, None, 0, None, 0)[len(given) :]][:6]
    return ahead, (bias, *by_rows)


def _attended(w: Writer, operands: Any, turned: tuple[str, str], extras: Any, options: Any) -> str:
    q, k, v = (type_of(x).shape for x in operands)
    scale, window, chunk, softcap, ahead = options
    heads = Heads(q[0], k[0], q[1], v[1], float(scale), int(window), int(chunk), float(softcap), int(ahead))
    sinks, alibi, bias = map(w.value, extras[:3])
    centre = type_of(extras[2]).shape[1] // 2 if bias else 0
    by_rows = [_row_bias(w, rows, int(later), heads) for rows, later in (extras[3:5], extras[5:7])]
    found = Extras(sinks, alibi, bias, centre, *by_rows)
    return attention(w.b, w.sequences, *turned, w.value(operands[2]), found, heads)


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

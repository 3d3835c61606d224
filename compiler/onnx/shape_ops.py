"""Writes ops that change shapes, and that select and join elements."""

from __future__ import annotations

import torch
from torch import fx

from ..graph.tensor_types import type_of
from .writer import Table, Writer

HANDLERS = Table()


@HANDLERS.handles("getitem")
def _getitem(w: Writer, node: fx.Node) -> str:
    source, index = node.args
    return w.values[source][index]  # type: ignore[index]


@HANDLERS.handles("aten.view")
def _view(w: Writer, node: fx.Node) -> str:
    return w.b.reshape(w.value(node.args[0]), *type_of(node).full_shape)


@HANDLERS.handles("aten.permute")
def _permute(w: Writer, node: fx.Node) -> str:
    x, order = node.args
    rank = type_of(node).rank
    return w.b.add("Transpose", w.value(x), perm=[int(d) % rank for d in order])  # type: ignore[union-attr]


@HANDLERS.handles("aten.expand")
def _expand(w: Writer, node: fx.Node) -> str:
    return w.b.add("Expand", w.value(node.args[0]), w.b.ints(*(max(1, s) for s in type_of(node).full_shape)))


@HANDLERS.handles("aten.slice")
def _slice(w: Writer, node: fx.Node) -> str:
    x, axis, start, end, *rest = node.args
    limit = 2**63 - 1
    bounds = [int(start or 0), limit if end is None else int(end), int(axis or 0), int(rest[0]) if rest else 1]  # type: ignore[arg-type]
    start, end, axis, step = (w.b.ints(v) for v in bounds)
    return w.b.add("Slice", w.value(x), start, end, axis, step)


@HANDLERS.handles("aten.cat")
def _cat(w: Writer, node: fx.Node) -> str:
    axis = int(node.args[1]) if len(node.args) > 1 else 0  # type: ignore[arg-type]
    return w.b.add("Concat", *(w.value(p) for p in node.args[0]), axis=axis)  # type: ignore[union-attr]


@HANDLERS.handles("aten.repeat")
def _repeat(w: Writer, node: fx.Node) -> str:
    x, counts = node.args
    value = w.value(x)
    missing = len(counts) - type_of(x).rank  # type: ignore[arg-type]
    if missing:
        value = w.b.add("Unsqueeze", value, w.b.ints(*range(missing)))
    return w.b.add("Tile", value, w.b.ints(*(int(c) for c in counts)))  # type: ignore[union-attr]


@HANDLERS.handles("embedding")
def _embedding(w: Writer, node: fx.Node) -> str:
    index, table = node.args
    return w.rows_of(table, w.value(index))  # type: ignore[arg-type]


@HANDLERS.handles("select_rows")
def _select_rows(w: Writer, node: fx.Node) -> str:
    return w.b.add("Gather", *map(w.value, node.args), axis=0)


@HANDLERS.handles("gather")
def _gather(w: Writer, node: fx.Node) -> str:
    x, index = node.args
    return w.b.add("GatherElements", w.value(x), w.b.cast(w.value(index), torch.int64), axis=-1)


@HANDLERS.handles("columns")
def _columns(w: Writer, node: fx.Node) -> str:
    x, order = node.args
    return w.b.add("Gather", w.value(x), w.b.cast(w.value(order), torch.int64), axis=-1)


@HANDLERS.handles("expert_columns")
def _expert_columns(w: Writer, node: fx.Node) -> str:
    x, order, index = node.args
    b, experts = w.b, type_of(order).shape[0]  # type: ignore[arg-type]
    nearest = b.add(
        "Clip", b.cast(w.value(index), torch.int64), b.constant(0, torch.int64), b.constant(experts - 1, torch.int64)
    )
    places = b.cast(b.add("Gather", w.value(order), nearest, axis=0), torch.int64)
    value = w.value(x)
    if type_of(x).rank == 2:  # type: ignore[arg-type]
        value = b.add("Expand", b.add("Unsqueeze", value, b.ints(1)), b.add("Shape", places))
    return b.add("GatherElements", value, places, axis=-1)


@HANDLERS.handles("scatter")
def _scatter(w: Writer, node: fx.Node) -> str:
    x, index, src, value, accumulate = node.args
    b, places = w.b, w.b.cast(w.value(index), torch.int64)
    if src is None:
        dtype = type_of(x).dtype  # type: ignore[arg-type]
        fill = b.constant(float(value) if dtype.is_floating_point else int(value), dtype)  # type: ignore[arg-type]
        source = b.add("Expand", fill, b.add("Shape", places))
    else:
        source = w.value(src)
    return b.add("ScatterElements", w.value(x), places, source, axis=-1, reduction="add" if accumulate else "none")

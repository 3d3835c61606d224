"""The division of a value after ops that only move its elements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ...compiler.graph.tensor_types import type_of
from .cuts import Conflict, Cut, compact, joined, reshaped, sliced
from .values import Divided, Values, seeds_of

aten = torch.ops.aten


def _cut(values: Values, x: Any) -> Cut:
    found = values.cut_of(x)
    assert found is not None
    return found


def _view(values: Values, node: fx.Node) -> Divided:
    x = node.args[0]
    new = type_of(node).shape
    cut = reshaped(_cut(values, x), type_of(x).shape, new)  # type: ignore[arg-type]
    return Divided(cut, (x, [-1, *_local(new, cut)]))


def _local(shape: tuple[int, ...], cut: Cut) -> list[int]:
    return [cut.size if axis == cut.axis else size for axis, size in enumerate(shape)]


def _permute(values: Values, node: fx.Node) -> Divided:
    x, order = node.args
    cut = _cut(values, x)
    axis = [at % len(order) for at in order].index(cut.axis + 1) - 1  # type: ignore[arg-type, union-attr]
    if axis < 0:
        raise Conflict("the rows are no first axis", cut)
    return Divided(Cut(axis, cut.cuts, cut.seeds), node.args)


def _expand(values: Values, node: fx.Node) -> Divided:
    x, old, new = node.args[0], type_of(node.args[0]).shape, type_of(node).shape  # type: ignore[arg-type]
    cut = _cut(values, x)
    axis = cut.axis + len(new) - len(old)
    if len(new) != len(old) or new[axis] != old[cut.axis]:
        raise Conflict("ranks have parts of what is repeated", cut)
    return Divided(Cut(axis, cut.cuts, cut.seeds), (x, [-1, *_local(new, cut)]))


def _repeat(values: Values, node: fx.Node) -> Divided:
    x, times = node.args
    cut = _cut(values, x)
    if len(times) != type_of(x).rank or times[cut.axis + 1] != 1:  # type: ignore[arg-type, index]
        raise Conflict("ranks have parts of what is repeated", cut)
    return Divided(cut, node.args)


def _slice(values: Values, node: fx.Node) -> Divided:
    args: tuple[Any, ...] = (*node.args, *(0, None, 1)[len(node.args) - 2 :])
    x, dim, begin, end, step = args
    cut = _cut(values, x)
    kind = type_of(x)
    axis: int = dim % kind.rank - 1
    if axis != cut.axis:
        return Divided(cut, node.args)
    size = kind.shape[axis]
    first, last = (place if place >= 0 else place + size for place in (begin or 0, size if end is None else end))  # type: ignore[operator]
    found, (low, high) = sliced(cut, first, min(last, size), step)  # type: ignore[arg-type]
    state = None if found.is_whole(type_of(node).shape[axis]) else found
    return Divided(state, (x, dim, low, high, step))


def _cat(values: Values, node: fx.Node) -> Divided:
    args: tuple[Any, ...] = (*node.args, 0)
    pieces, dim = args[:2]
    cuts = [values.cut_of(piece) for piece in pieces]
    known = [cut for cut in cuts if cut is not None]
    axis: int = dim % type_of(node).rank - 1
    if len(known) < len(cuts) or len({cut.axis for cut in known}) > 1:
        raise Conflict("ranks have parts of some pieces only, or of different axes", *known)
    if known[0].axis != axis:
        if len({cut.cuts for cut in known}) > 1:
            raise Conflict("ranks have different parts of the pieces", *known)
        return Divided(Cut(known[0].axis, known[0].cuts, seeds_of(known)), node.args)
    moved, start = list[Any](), 0
    for piece, cut in zip(pieces, known, strict=True):  # type: ignore[arg-type]
        moved.append(tuple(compact([(a + start, b + start) for a, b in own]) for own in cut.cuts))
        start += type_of(piece).shape[axis]  # type: ignore[arg-type]
    return Divided(Cut(axis, joined(moved), seeds_of(known)), node.args)


MOVES: dict[Any, Callable[[Values, fx.Node], Divided]] = {
    aten.view.default: _view, aten.permute.default: _permute, aten.expand.default: _expand,
    aten.repeat.default: _repeat, aten.slice.Tensor: _slice, aten.cat.default: _cat,
}  # fmt: skip

"""Norms of lines that are divided among ranks: one number per line is summed over ranks."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import torch
from torch import fx

from ...compiler.graph.graph import Graph
from ...compiler.graph.tensor_types import type_of
from ...compiler.ops import OPS
from .cuts import Conflict, Cut, elements
from .values import Divided, Values

aten = torch.ops.aten
RMS_NORM, REDUCE, ALL_REDUCE = (OPS[name].overload for name in ("rms_norm", "reduce", "all_reduce"))


def norm_of(values: Values, node: fx.Node) -> Divided | None:
    """rms_norm over an axis that is divided, such as over all heads of q; None for another call."""
    if node.target is not RMS_NORM:
        return None
    args: tuple[Any, ...] = node.args
    x, weight, eps = args
    cut, size = values.cut_of(x), type_of(x).shape[-1]
    if cut is None or cut.axis != len(type_of(x).shape) - 1:
        return None
    if weight is not None and type_of(weight).shape != (size,):
        raise Conflict("a norm's factors differ by line", cut)
    local = None if weight is None else values.part(weight, 0, cut)
    count = size * _times(cut, size)
    return Divided(cut, (x, local, eps), partial(_summed_norm, count=count))


def _times(cut: Cut, size: int) -> int:
    """How many ranks have each element of an axis; Conflict if the numbers differ."""
    owners = Counter(element for own in cut.cuts for element in elements(own))
    times = set(owners.values())
    if len(owners) != size or len(times) > 1:
        raise Conflict("some elements of a line are on more ranks than others", cut)
    return times.pop()


def _summed_norm(graph: Graph, node: fx.Node, count: int) -> fx.Node:
    """x rsqrt(sum of x^2 over ranks / count + eps) weight."""
    args: tuple[Any, ...] = node.args
    x, weight, eps = args
    square = graph.call(aten.mul.Tensor, x, x, origin=node)
    own = graph.call(REDUCE, square, "sum", type_of(x).rank - 1, origin=node)
    own = graph.call(aten.view.default, own, [-1, *type_of(x).shape[:-1], 1], origin=node)
    total = graph.call(ALL_REDUCE, own, origin=node)
    mean = graph.call(aten.mul.Tensor, total, 1.0 / count, origin=node)
    scale = graph.call(aten.rsqrt.default, graph.call(aten.add.Tensor, mean, eps, origin=node), origin=node)
    y = graph.call(aten.mul.Tensor, x, scale, origin=node)
    return y if weight is None else graph.call(aten.mul.Tensor, y, weight, origin=node)

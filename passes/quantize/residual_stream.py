"""The residual stream of a graph, for rotations: all values that rotate together, and the ops at their ends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ...compiler.graph.graph import Graph
from ...compiler.graph.printer import target_name
from ...compiler.ops import OPS, traits_of
from .element_ties import full_shape
from .select import EMBEDDING, EXPERT, LINEAR

aten = torch.ops.aten
RMS, REDUCE = (OPS[name].overload for name in ("rms_norm", "reduce"))


class Pinned(Exception):
    """Values cannot be rotated; the message says why."""


@dataclass
class Stream:
    """The values that are rotated together, and the ops at their ends."""

    graph: Graph
    width: int
    inside: dict[fx.Node, None] = field(default_factory=dict)
    pending: list[fx.Node] = field(default_factory=list)
    writers: list[fx.Node] = field(default_factory=list)
    tables: list[fx.Node] = field(default_factory=list)
    readers: list[tuple[fx.Node, fx.Node | None]] = field(default_factory=list)
    norms: list[fx.Node] = field(default_factory=list)

    def add(self, node: Any) -> None:
        """Add a value to the stream."""
        if node in self.inside:
            return
        if not isinstance(node, fx.Node) or full_shape(node)[-1:] != (self.width,):
            raise Pinned("a constant is added to the residual stream")
        self.inside[node] = None
        self.pending.append(node)

    def grow(self) -> None:
        """Follow every value to its ends."""
        while self.pending:
            node = self.pending.pop()
            self._definition(node)
            for user in list(node.users):
                self._use(node, user)

    def _definition(self, node: fx.Node) -> None:
        if node.target in (LINEAR, EXPERT):
            self.writers.append(node)
        elif node.target is EMBEDDING:
            self.tables.append(node)
        else:
            operands = list(self._through(node))
            if not operands:
                gain = " with a gain" if node.target is RMS else ""
                raise Pinned(f"the residual stream is written by {target_name(node.target)}{gain}")
            for operand in operands:
                self.add(operand)

    def _use(self, node: fx.Node, user: fx.Node) -> None:
        if user.op == "output":
            raise Pinned("the residual stream is an output of the model")
        if user.target in (LINEAR, EXPERT) and user.args[0] is node:
            self.readers.append((user, None))
        elif user.target is RMS and user.args[0] is node and user.args[1] is not None:
            self.norms.append(user)
            self._normed(user, user)
        elif node in self._through(user):
            self.add(user)
        else:
            raise Pinned(f"the residual stream is read by {target_name(user.target)}")

    def _normed(self, norm: fx.Node, value: fx.Node) -> None:
        for user in value.users:
            if user.target in (LINEAR, EXPERT) and user.args[0] is value:
                self.readers.append((user, norm))
            elif user.op == "call_function" and traits_of(user.target).moves_only and _keeps_last(user):
                self._normed(norm, user)
            else:
                what = "an output of the model" if user.op == "output" else f"read by {target_name(user.target)}"
                raise Pinned(f"a norm's result is {what}")

    def _through(self, node: fx.Node) -> Iterator[Any]:
        """The operands that are rotated if the result is; no operands if the op does not commute with a rotation."""
        args = node.args
        if node.op != "call_function" or isinstance(node.meta["type"], tuple):
            return
        if node.target in (aten.add.Tensor, aten.sub.Tensor) and not node.kwargs:
            yield from args[:2]
        elif node.target is aten.mul.Tensor or node.target is aten.div.Tensor:
            wide = [a for a in args[:2] if isinstance(a, fx.Node) and full_shape(a)[-1:] == (self.width,)]
            if len(wide) == 1 and (node.target is aten.mul.Tensor or wide[0] is args[0]):
                yield wide[0]
        elif (node.target is RMS and args[1] is None) or (
            node.target is REDUCE and args[1] in ("sum", "mean") and not _over_last(node)
        ):
            yield args[0]
        elif traits_of(node.target).moves_only and isinstance(args[0], fx.Node) and _keeps_last(node):
            yield args[0]


def _over_last(node: fx.Node) -> bool:
    """Whether a reduction is over the last axis."""
    rank = len(full_shape(node.args[0]))  # type: ignore[arg-type]
    return int(node.args[2]) % rank == rank - 1  # type: ignore[call-overload]


def _keeps_last(node: fx.Node) -> bool:
    """Whether an op that moves elements keeps the rows of the last axis whole."""
    x = node.args[0]
    if not isinstance(x, fx.Node) or full_shape(x)[-1:] != full_shape(node)[-1:]:
        return False
    shape, width = full_shape(x), full_shape(x)[-1]
    index = node.target(torch.arange(shape.numel()).view(shape), *node.args[1:])  # type: ignore[operator]
    first = index[..., :1]
    return bool((first % width == 0).all() and (index == first + torch.arange(width)).all())

"""How ranks have the values of a graph, while a division of it is looked for, and what a call takes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from ...compiler.graph.graph import Graph
from ...compiler.graph.tensor_types import type_of
from ...compiler.weights.formats.base import Misfit
from ...compiler.weights.handles import SortedColumns, Weight
from ...compiler.weights.shards import Cuts, OnFirst, shard
from .cuts import Conflict, Cut, Partial, Routed, Seed, State, Unknown


@dataclass(frozen=True)
class Total:
    """The sum over ranks of a value, in place of what a rank has."""

    value: fx.Node


@dataclass(frozen=True)
class Part:
    """What a rank has of a weight: `weight`, a handle that stands for all ranks."""

    name: str
    weight: Weight


@dataclass(frozen=True)
class Local:
    """Numbers of experts or words, counted from the first of those that a rank has."""

    index: fx.Node
    cuts: Cuts


@dataclass(frozen=True)
class Divided:
    """A call as ranks do it. state: how they have the result. args: the arguments, in which Total, Part and Local stand
    for what a rank has. then: a function of the graph and the call that puts several calls in its place."""

    state: State
    args: tuple[Any, ...]
    then: Callable[[Graph, fx.Node], fx.Node] | None = None


class Stopped(Exception):
    """A call depends on a conflict that is known already."""


@dataclass
class Values:
    """How the ranks have every value that is computed before a call (`states`), and the parts of weights that were cut
    so far. seeds: by product and piece of its columns, in how many parts the piece is divided."""

    graph: Graph
    ranks: int
    seeds: dict[Seed, int]
    states: dict[fx.Node, State] = field(default_factory=dict[fx.Node, State])
    parts: dict[Any, Weight | Misfit] = field(default_factory=dict[Any, "Weight | Misfit"])

    def state(self, node: fx.Node) -> State:
        """How the ranks have a value; Stopped where that depends on a conflict."""
        found = self.states.get(node)
        if isinstance(found, Unknown):
            raise Stopped
        return found

    def whole(self, value: Any) -> Any:
        """A value as an argument of a call that needs all of it; anything else as it is."""
        if not isinstance(value, fx.Node):
            return value
        match self.state(value):
            case None:
                return value
            case Partial() | Routed(zeros=True):
                return Total(value)
            case state:
                raise Conflict("is needed whole", state)

    def all_whole(self, args: Any) -> Any:
        """The arguments of a call, all whole."""
        return map_values(args, self.whole)

    def cut_of(self, value: Any) -> Cut | None:
        """The cut of a value that is divided along an axis; None of others."""
        found = self.state(value) if isinstance(value, fx.Node) else None
        return found if isinstance(found, Cut) else None

    def part(self, node: fx.Node, axis: int, cut: Cut) -> Part:
        """Ranges of an axis of a weight. Conflict where its storage cannot be cut there."""
        weight = self.graph.weight(node)
        key = id(weight), axis % len(weight.shape), cut.cuts
        if key not in self.parts:
            self.parts[key] = _cut(weight, key[1], cut.cuts)
        found = self.parts[key]
        if isinstance(found, Misfit):
            raise Conflict(str(found), cut)
        return Part(str(node.target), found)

    def once(self, node: fx.Node) -> Part:
        """A weight that one rank adds, and the others do not."""
        weight = self.graph.weight(node)
        found = self.parts.setdefault((id(weight), "once"), OnFirst(weight))
        assert isinstance(found, Weight)
        return Part(str(node.target), found)


def _cut(weight: Weight, axis: int, cuts: Cuts) -> Weight | Misfit:
    try:
        if isinstance(weight, SortedColumns) and axis == len(weight.shape) - 1:
            return Misfit("its columns are stored in another order")
        return shard(weight, axis, cuts)
    except Misfit as misfit:
        return misfit


def map_values(args: Any, change: Callable[[fx.Node], Any]) -> Any:
    """The arguments with each value in them changed."""
    if isinstance(args, fx.Node):
        return change(args)
    if isinstance(args, (list, tuple)):
        return type(args)(map_values(value, change) for value in args)  # type: ignore[call-arg]
    return args


def size_of(value: fx.Node, axis: int) -> int:
    """The size of an axis of a value or weight, counted behind the rows; 1 where it has fewer axes."""
    shape = type_of(value).shape
    return shape[axis] if -len(shape) <= axis < len(shape) else 1


def seeds_of(states: Iterable[State]) -> frozenset[Seed]:
    """The products whose division led to these states."""
    return frozenset[Seed]().union(*(state.seeds for state in states if state is not None))

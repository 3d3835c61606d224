"""The state of a graph's values during the search for a division, and the arguments that calls take from them."""

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
    """An argument: the sum of a value over ranks, instead of the rank's own value."""

    value: fx.Node


@dataclass(frozen=True)
class Part:
    """An argument: a rank's part of a weight. `weight`: a handle that stands for all ranks' parts."""

    name: str
    weight: Weight


@dataclass(frozen=True)
class Local:
    """An argument: numbers of experts or words, counted from the rank's first one."""

    index: fx.Node
    cuts: Cuts


@dataclass(frozen=True)
class Divided:
    """A call as ranks compute it. state: how the result is divided. args: the arguments, with Total, Part and Local for
    values of a rank. then: a function of the graph and the call that replaces it by several calls; None: it stays
    one."""

    state: State
    args: tuple[Any, ...]
    then: Callable[[Graph, fx.Node], fx.Node] | None = None


class Stopped(Exception):
    """A call depends on a conflict that was found before."""


@dataclass
class Values:
    """The state of every value that is computed before a call (`states`), and the parts of weights that were cut so
    far. seeds: by product and piece of its columns, the number of parts that the piece is divided into."""

    graph: Graph
    ranks: int
    seeds: dict[Seed, int]
    states: dict[fx.Node, State] = field(default_factory=dict[fx.Node, State])
    parts: dict[Any, Weight | Misfit] = field(default_factory=dict[Any, "Weight | Misfit"])

    def state(self, node: fx.Node) -> State:
        """The state of a value; Stopped if it depends on a conflict."""
        found = self.states.get(node)
        if isinstance(found, Unknown):
            raise Stopped
        return found

    def whole(self, value: Any) -> Any:
        """A value as an argument of a call that needs all of it; anything else unchanged."""
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
        """The cut of a value that is divided along an axis; None for other values."""
        found = self.state(value) if isinstance(value, fx.Node) else None
        return found if isinstance(found, Cut) else None

    def part(self, node: fx.Node, axis: int, cut: Cut) -> Part:
        """The part of a weight given by ranges of an axis. Conflict if its storage cannot be cut there."""
        weight = self.graph.weight(node)
        key = id(weight), axis % len(weight.shape), cut.cuts
        if key not in self.parts:
            self.parts[key] = _cut(weight, key[1], cut.cuts)
        found = self.parts[key]
        if isinstance(found, Misfit):
            raise Conflict(str(found), cut)
        return Part(str(node.target), found)

    def once(self, node: fx.Node) -> Part:
        """A weight that only the first rank adds."""
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
    """The size of an axis of a value or weight, not counting the row axis; 1 if it has fewer axes."""
    shape = type_of(value).shape
    return shape[axis] if -len(shape) <= axis < len(shape) else 1


def seeds_of(states: Iterable[State]) -> frozenset[Seed]:
    """The products whose division led to these states."""
    return frozenset[Seed]().union(*(state.seeds for state in states if state is not None))

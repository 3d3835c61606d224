"""One graph for several ranks, each of which has parts of the weights: columns and rows of products (Shoeybi et al.
2019, Megatron-LM, arXiv:1909.08053), heads, words, experts (Lepikhin et al. 2020, GShard, arXiv:2006.16668).

The division is found by a search: at first all products are divided by columns, and the division of every other value
follows from the ops. If an op needs elements that a rank does not have, the products that it depends on are divided
into fewer parts, in the end into one. A value that is a sum over ranks is added up where an op needs the total.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from ...compiler.graph.facts import Fact
from ...compiler.graph.graph import Graph
from ...compiler.graph.tensor_types import infer_type, type_of
from ...compiler.ops import OPS
from ..base import Pass, PassContext, PassResult, Refusal
from .columns import BY_EXPERT, WORDS, find_seeds, local_index, most_parts, pieces_of
from .cuts import Conflict, Cut, Seed, Unknown, evenly
from .rules import divide_call
from .values import Divided, Local, Part, Stopped, Total, Values, seeds_of

ALL_REDUCE, ALL_GATHER = OPS["all_reduce"].overload, OPS["all_gather"].overload
KINDS = {BY_EXPERT: "experts", WORDS: "words"}


@dataclass(frozen=True)
class DivideAmongRanks(Pass):
    """Divides everything possible among `ranks`. tensors: columns, rows, heads and vocabulary; experts: whole experts,
    so that a token's expert results are added in the same order as on one rank, bit for bit."""

    name: ClassVar[str] = "divide"
    requires: ClassVar[frozenset[str]] = frozenset({Fact.PAGED, Fact.LOGIT_ROWS})
    breaks: ClassVar[frozenset[str]] = frozenset({Fact.UNIQUE, Fact.SIMPLE, Fact.FOLDED})
    tolerance: ClassVar[float | None] = 1e-5

    ranks: int = 2
    tensors: bool = True
    experts: bool = False

    def run(self, graph: Graph, ctx: PassContext) -> PassResult:
        if graph.ranks > 1 or self.ranks < 2:
            return PassResult(False)
        search = _Search(graph, self.ranks, find_seeds(graph, self.ranks, self.tensors, self.experts))
        calls, ends = search.run()
        ctx.refusals.extend(Refusal(self.name, seed[0], reason) for seed, reason in search.refused.items())
        if not search.seeds:
            return PassResult(False)
        totals = _apply(graph, calls, ends)
        graph.ranks = self.ranks
        counts = Counter(KINDS.get(piece, "columns") for _, piece in search.seeds)
        return PassResult(True, counts + Counter({"kept whole": len(search.refused), "sums": totals}))


class _Search:
    """Searches for the finest division in which every call has its operands."""

    def __init__(self, graph: Graph, ranks: int, seeds: dict[Seed, int]) -> None:
        self.graph, self.ranks, self.seeds = graph, ranks, seeds
        self.refused: dict[Seed, str] = {}
        self._nodes = {node.name: node for node in graph.nodes}
        self._parts: dict[Any, Any] = {}

    def run(self) -> tuple[dict[fx.Node, Divided], dict[str, Any]]:
        """How ranks compute each call, and the outputs by name, which are whole."""
        while True:
            values = Values(self.graph, self.ranks, self.seeds, parts=self._parts)
            calls, conflicts = self._walk(values)
            ends: dict[str, Any] = {}
            for name, node in self.graph.outputs.items():
                try:
                    ends[name] = _ended(values, node)
                except Stopped:
                    pass
                except Conflict as conflict:
                    conflicts.append(conflict)
            if not conflicts:
                return calls, ends
            self._coarsen(conflicts)

    def _walk(self, values: Values) -> tuple[dict[fx.Node, Divided], list[Conflict]]:
        calls: dict[fx.Node, Divided] = {}
        conflicts: list[Conflict] = []
        for node in self.graph.nodes:
            if node.op != "call_function":
                continue
            try:
                calls[node] = divide_call(values, node)
                values.states[node] = calls[node].state
            except (Conflict, Stopped) as stop:
                if isinstance(stop, Conflict):
                    conflicts.append(stop)
                values.states[node] = Unknown(seeds_of(values.states.get(a) for a in node.all_input_nodes))
        return calls, conflicts

    def _coarsen(self, conflicts: Iterable[Conflict]) -> None:
        """Divide the seeds with the most parts, among these the smallest, into fewer parts; each once, even if several
        conflicts name it."""
        fewer: dict[Seed, str] = {}
        for conflict in conflicts:
            found = {seed: (-self.seeds[seed], self._size(seed)) for seed in conflict.seeds & self.seeds.keys()}
            first = min(found.values(), default=None)
            fewer.update({seed: str(conflict) for seed, order in found.items() if order == first})
        assert fewer, "a conflict of nothing that is divided"
        for seed, reason in fewer.items():
            self.seeds[seed] = self._fewer(seed)
            if self.seeds[seed] == 1:
                del self.seeds[seed]
                self.refused[seed] = reason

    def _fewer(self, seed: Seed) -> int:
        return 1 if seed[1] < 0 else most_parts(self._size(seed), self.ranks, self.seeds[seed])

    def _size(self, seed: Seed) -> int:
        """How many columns a piece has; 0 for experts and words."""
        name, piece = seed
        begin, end = pieces_of(self._nodes[name])[piece] if piece >= 0 else (0, 0)
        return end - begin


def _ended(values: Values, node: fx.Node) -> Any:
    """A whole output: a Total, or a Cut of the last axis that is to be gathered."""
    state = values.state(node)
    if isinstance(state, Cut):
        size = type_of(node).shape[-1]
        if state.axis != len(type_of(node).shape) - 1 or state.cuts != evenly(0, size, values.ranks, values.ranks):
            raise Conflict("ranks have no equal parts of an output, in order", state)
        return state
    return values.whole(node)


# -- the graph of a rank ----------------------------------------------------------------------------------------------


def _apply(graph: Graph, calls: dict[fx.Node, Divided], ends: dict[str, Any]) -> int:
    """Rewrite the calls; returns how many sums over ranks there are."""
    totals: dict[fx.Node, fx.Node] = {}
    locals_: dict[Local, fx.Node] = {}
    moved: dict[fx.Node, fx.Node] = {}  # values that now take more than one call

    def given(arg: Any) -> Any:
        """The argument of the call at the insertion point."""
        if isinstance(arg, Total):
            value = moved.get(arg.value, arg.value)
            if value not in totals:
                with graph.fx.inserting_after(value):
                    totals[value] = graph.call(ALL_REDUCE, value, origin=value)
            return totals[value]
        if isinstance(arg, Part):
            return graph.add_weight(arg.name, arg.weight)
        if isinstance(arg, Local):
            index = moved.get(arg.index, arg.index)
            if arg not in locals_:
                locals_[arg] = local_index(graph, Local(index, arg.cuts))
            return locals_[arg]
        if isinstance(arg, (list, tuple)):
            return type(arg)(given(value) for value in arg)  # type: ignore[call-arg]
        return moved.get(arg, arg) if isinstance(arg, fx.Node) else arg

    for node, call in calls.items():
        with graph.fx.inserting_before(node):
            node.args = given(call.args)
            node.meta["type"] = infer_type(node)
            if call.then is not None:
                moved[node] = call.then(graph, node)
    for name, end in ends.items():
        with graph.fx.inserting_before(graph.end):
            graph.returns(**{name: _end(graph, graph.outputs[name], end, given, moved)})
    return len(totals)


def _end(graph: Graph, node: fx.Node, end: Any, given: Any, moved: dict[fx.Node, fx.Node]) -> fx.Node:
    if isinstance(end, Cut):
        return graph.call(ALL_GATHER, moved.get(node, node), len(end.cuts), origin=node)
    return given(end)

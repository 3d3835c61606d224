"""One graph for the stages of a pipeline, each with some of the layers (Huang et al. 2019, GPipe, arXiv:1811.06965).

The graph's order is cut where few bytes cross and the longest stage is as short as possible. Values that depend only on
positions are not transferred: each rank computes them itself.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, prod
from typing import ClassVar

from torch import fx

from ...compiler.graph.facts import Fact
from ...compiler.graph.graph import Graph, layer_of
from ...compiler.graph.tensor_types import TensorType
from ...compiler.ops import OPS, traits_of
from ..base import Pass, PassContext, PassResult, Refusal

TRANSFER = OPS["transfer"].overload
WORTH = 0.75  # cuts that more bytes cross must shorten the longest stage to this share
CostOf = Callable[[Graph, fx.Node], float]


def stored_bytes(graph: Graph, node: fx.Node) -> float:
    """The default cost of a call: the bytes of its weights, each counted once."""
    weights = {arg: graph.weight(arg) for arg in node.all_input_nodes if arg.op == "get_attr"}
    return float(sum(prod(w.shape) * w.dtype.itemsize for w in weights.values())) if _multiplies(node) else 0.0


@dataclass(frozen=True)
class CutIntoStages(Pass):
    """Cuts the graph into `stages` consecutive parts, each for as many ranks as the graph was divided among. cost: the
    cost of a call, in seconds or any other unit."""

    name: ClassVar[str] = "stages"
    requires: ClassVar[frozenset[str]] = frozenset({Fact.PAGED, Fact.LOGIT_ROWS})
    tolerance: ClassVar[float | None] = 0.0

    stages: int = 2
    cost: CostOf = stored_bytes

    def run(self, graph: Graph, ctx: PassContext) -> PassResult:
        if graph.stages > 1 or self.stages < 2:
            return PassResult(False)
        line = _CallLine(graph, self.cost)
        cuts = line.choose(self.stages)
        if not cuts:
            ctx.refusals.append(Refusal(self.name, graph.output.name, f"there are no {self.stages} parts of the graph"))
            return PassResult(False)
        for stage, (cut, cost) in enumerate(zip((0, *cuts), line.costs(cuts), strict=True)):
            first = next((n for n in line.calls[cut:] if _multiplies(n)), line.calls[cut])
            given = f", takes {line.bytes_at(cut)} bytes per token" if stage else ""
            share = 100 * cost / max(line.total, 1e-30)
            said = f"stage {stage} begins here{given}; modelled {cost:.3g}, {share:.0f} % of a token's cost"
            ctx.refusals.append(Refusal(self.name, str(first.meta.get("module") or first.name), said))
        moved = sum(line.hand_over(cut, stage) for stage, cut in enumerate(cuts, 1))
        graph.stages = self.stages
        graph.ranks *= self.stages
        return PassResult(True, Counter({"cuts": len(cuts), "values that cross": moved}))


class _CallLine:
    """The calls of a graph in their order, and the values that cross each place between two of them."""

    def __init__(self, graph: Graph, cost: CostOf) -> None:
        self.graph = graph
        self.calls = [node for node in graph.nodes if node.op == "call_function"]
        self._place = {node: place for place, node in enumerate(self.calls)}
        self._sums = [0.0]
        for node in self.calls:
            self._sums.append(self._sums[-1] + cost(graph, node))
        self._own = _depend_on_tokens(graph)
        self._moved: dict[fx.Node, fx.Node] = {}  # the last transfer of each value that crosses
        ends = len(self.calls)
        self._ends = {node: max((self._place.get(u, ends) for u in node.users), default=-1) for node in self.calls}
        self._bytes, self._joined = [0] * (len(self.calls) + 1), [False] * (len(self.calls) + 1)
        self._measure()

    @property
    def total(self) -> float:
        """The cost of all calls."""
        return self._sums[-1]

    def costs(self, cuts: Sequence[int]) -> list[float]:
        """The cost of each stage."""
        ends = [0, *cuts, len(self.calls)]
        return [self._sums[b] - self._sums[a] for a, b in itertools.pairwise(ends)]

    def bytes_at(self, cut: int) -> int:
        """Bytes per row of values that are computed before a place and needed after it."""
        return self._bytes[cut]

    def choose(self, stages: int) -> list[int]:
        """Where each stage but the first begins; empty if the graph cannot be cut into so many."""
        products = [place for place, node in enumerate(self.calls) if _multiplies(node)]
        if not products:
            return []
        places = [p for p in range(products[0] + 1, products[-1] + 1) if not self._joined[p]]
        best, least = list[int](), inf
        for level in sorted({self._bytes[p] for p in places}):
            found = self._split([p for p in places if self._bytes[p] <= level], stages)
            if found and max(self.costs(found)) < WORTH * least:
                best, least = found, max(self.costs(found))
            if least <= self.total / stages / WORTH:
                break
        return best

    def hand_over(self, cut: int, stage: int) -> int:
        """Transfer to `stage`, which begins at `cut`, the values that it reads; returns how many there are."""
        crossing = [node for node in self.calls[:cut] if node in self._own and self._ends[node] >= cut]
        for node in crossing:
            source = self._moved.get(node, node)
            with self.graph.fx.inserting_before(self.calls[cut]):
                given = self.graph.call(TRANSFER, source, stage, origin=self.calls[cut])
            for user in list(source.users):
                if user.target is not TRANSFER and self._place.get(user, len(self.calls)) >= cut:
                    user.replace_input_with(source, given)
            self._moved[node] = given
        return len(crossing)

    def _measure(self) -> None:
        layers: dict[int, tuple[int, int]] = {}
        for place, node in enumerate(self.calls):
            if traits_of(node.target).stateful:
                layer = layer_of(node)
                layers[layer] = layers.get(layer, (place, place))[0], place
            kind = node.meta["type"]
            if node not in self._own:
                continue
            nbytes = prod(kind.shape) * kind.dtype.itemsize if isinstance(kind, TensorType) else 0
            for cut in range(place + 1, self._ends[node] + 1):
                self._bytes[cut] += nbytes
                self._joined[cut] |= not isinstance(kind, TensorType) or kind.rows is None
        for first, last in layers.values():  # a cache belongs to one rank
            for cut in range(first + 1, last + 1):
                self._joined[cut] = True

    def _split(self, places: list[int], stages: int) -> list[int]:
        """The places, one fewer than stages, for which the most expensive stage is as cheap as possible; empty if there
        are too few places."""
        if len(places) < stages - 1:
            return []
        low, high, found = self.total / stages, self.total, places[: stages - 1]
        for _ in range(30):
            most = (low + high) / 2
            cuts = self._fill(places, stages, most)
            low, high, found = (most, high, found) if cuts is None else (low, most, cuts)
        return found

    def _fill(self, places: list[int], stages: int, most: float) -> list[int] | None:
        """Cuts such that no stage costs more than `most`; None if there are none."""
        cuts: list[int] = []
        for number, place in enumerate(places):
            begin = self._sums[cuts[-1] if cuts else 0]
            following = places[number + 1] if number + 1 < len(places) else len(self.calls)
            left = len(places) - number  # the number of places that could still be cuts
            if self._sums[following] - begin > most or left <= stages - 1 - len(cuts):
                cuts.append(place)
            if len(cuts) == stages - 1:
                break
        return cuts if len(cuts) == stages - 1 and max(self.costs(cuts)) <= most else None


def _multiplies(node: fx.Node) -> bool:
    return bool(traits_of(node.target).product)


def _depend_on_tokens(graph: Graph) -> set[fx.Node]:
    """The calls whose results depend on the tokens, not only on positions and row numbers."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder" and node.target == "token_ids":
            found.add(node)
        elif node.op == "call_function" and not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found

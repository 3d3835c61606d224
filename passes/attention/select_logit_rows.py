"""Compute logits only for the token rows that the scheduler asks for.

The rows are selected as early as possible: everything after the last op that mixes tokens or joins branches works on
the selected rows, most importantly the final norm and the LM head.
"""

from __future__ import annotations

import operator
from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from ...compiler.errors import PassError
from ...compiler.graph.facts import Fact
from ...compiler.graph.graph import LOGITS, TAP, Graph, ancestors
from ...compiler.graph.tensor_types import DRAFT_ROWS, LOGIT_ROWS, infer_type
from ...compiler.ops import OPS, traits_of
from ..base import Pass, PassContext, PassResult

SELECT = OPS["select_rows"].overload


@dataclass(frozen=True)
class SelectLogitRows(Pass):
    """Inserts select_rows before the tail of the graph."""

    name: ClassVar[str] = "select-logit-rows"
    ensures: ClassVar[frozenset[str]] = frozenset({Fact.LOGIT_ROWS})
    breaks: ClassVar[frozenset[str]] = frozenset({Fact.UNIQUE})

    def run(self, graph: Graph, ctx: PassContext) -> PassResult:
        if graph.input("logit_rows") is not None:
            return PassResult(False)
        rows = graph.fixed_input(LOGIT_ROWS)
        regions = {name: graph.section_nodes(name) for name in graph.sections}
        tail = _tail(graph, graph.section_nodes())
        first = tail[0]
        source = _token_inputs(first)[0]
        with graph.fx.inserting_before(first):
            selected = graph.call(SELECT, source, rows, origin=source)
        for node in tail:
            node.replace_input_with(source, selected)
            if node.op == "call_function":
                node.meta["type"] = infer_type(node)
        for name, region in regions.items():
            _Region(graph, name, region).select()
        return PassResult(True, Counter({"selected": 1 + len(regions)}))


class _Region:
    """The nodes that a section needs and a step does not. A section that gives logits gives those of a step's logit
    rows, and keeps all tokens where its own attention needs them; any other section reads the rows it is run for, some
    of the logit rows, or in TAP of the tokens."""

    def __init__(self, graph: Graph, section: str, nodes: set[fx.Node]) -> None:
        self._graph, self._section, self._nodes = graph, section, nodes
        self._asked = LOGITS not in graph.sections[section]
        mixing = [] if self._asked else [node for node in nodes if _mixes(node)]
        self._whole = ancestors(*mixing) & nodes  # nodes whose rows other tokens need
        self._selected: dict[tuple[fx.Node, str], fx.Node] = {}  # by the value that the section reads, and its rows

    def select(self) -> None:
        calls = [node for node in self._graph.nodes if node in self._nodes and node.op == "call_function"]
        for node in calls:
            if node in self._whole:
                continue
            if self._asked and _mixes(node):
                raise PassError(f"section {self._section}: {node.name} reads other tokens, of which there are none")
            if self._selects_again(node):
                node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
                self._graph.fx.erase_node(node)
                continue
            for source in _token_inputs(node):
                if source not in self._nodes or source in self._whole:
                    node.replace_input_with(source, self._rows_of(source, node))
            node.meta["type"] = infer_type(node)
        for name, node in self._graph.sections[self._section].items():
            if node not in self._nodes:  # the step computes it, too
                self._graph.returns(**{f"{self._section}.{name}": self._rows_of(node, self._graph.end)})

    def _selects_again(self, node: fx.Node) -> bool:
        """Whether a node selects the section's rows of a value that already has only those rows."""
        return self._asked and node.target is SELECT and _rows(node.args[0]) == _rows(node.args[1]) == DRAFT_ROWS  # type: ignore[arg-type]

    def _rows_of(self, source: fx.Node, reader: fx.Node) -> fx.Node:
        """The rows of a value that the section reads."""
        graph, wanted = self._graph, DRAFT_ROWS if self._asked else LOGIT_ROWS
        if reader.target is SELECT and _rows(reader) == DRAFT_ROWS:
            wanted = LOGIT_ROWS  # of which the reader selects those that the section is run for
        if _rows(source) == wanted:
            return source
        if (source, wanted) in self._selected:
            return self._selected[source, wanted]
        with graph.fx.inserting_before(reader):
            found = source
            if _rows(found) != LOGIT_ROWS and not (self._section == TAP and wanted == DRAFT_ROWS):
                found = graph.call(SELECT, found, graph.fixed_input(LOGIT_ROWS), origin=source)
            if wanted == DRAFT_ROWS:
                found = graph.call(SELECT, found, graph.fixed_input(DRAFT_ROWS), origin=source)
        self._selected[source, wanted] = found
        return found


def _mixes(node: fx.Node) -> bool:
    """Whether a call reads other tokens than its own."""
    return node.op == "call_function" and node.target is not operator.getitem and traits_of(node.target).mixes_tokens


def _token_inputs(node: fx.Node) -> list[fx.Node]:
    return [n for n in node.all_input_nodes if n.op != "get_attr" and _rows(n) is not None]


def _rows(node: fx.Node) -> str | None:
    found = node.meta["type"]
    return found[0].rows if isinstance(found, tuple) else found.rows


def _tail(graph: Graph, asked: set[fx.Node]) -> list[fx.Node]:
    """The nodes after the selection, in order: a chain with one token input and no other users but `asked`."""
    tail = [graph.end]
    while True:
        inputs = _token_inputs(tail[0])
        source = inputs[0]
        if source.op == "placeholder" or len(set(source.users) - asked) > 1 or len(_token_inputs(source)) != 1:
            return tail
        if source.target is operator.getitem or traits_of(source.target).mixes_tokens:
            return tail
        tail.insert(0, source)

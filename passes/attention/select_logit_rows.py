"""Compute logits only for the token rows that the scheduler asks for.

The rows are selected as early as possible: everything after the last place where tokens or branches meet works on the
selected rows, the final norm and the LM head above all.
"""

from __future__ import annotations

import operator
from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from ...compiler.graph.facts import Fact
from ...compiler.graph.graph import DRAFT_ROWS, LOGIT_ROWS, Graph, TensorType, infer_type
from ...compiler.ops import OPS, traits_of
from ..base import Pass, PassContext, PassResult

SELECT = OPS["select_rows"].overload


@dataclass(frozen=True)
class SelectLogitRows(Pass):
    """Insert select_rows in front of the tail of the graph."""

    name: ClassVar[str] = "select-logit-rows"
    ensures: ClassVar[frozenset[str]] = frozenset({Fact.LOGIT_ROWS})
    breaks: ClassVar[frozenset[str]] = frozenset({Fact.UNIQUE})

    def run(self, graph: Graph, ctx: PassContext) -> PassResult:
        if graph.input("logit_rows") is not None:
            return PassResult(False)
        positions = graph.input("positions") or graph.input("token_ids")
        assert positions is not None
        with graph.fx.inserting_after(positions):
            rows = graph.fx.placeholder("logit_rows")
        rows.meta["type"] = TensorType(LOGIT_ROWS, (), torch.int64)
        drafts, early = graph.draft_nodes(), graph.exit_nodes()
        tail = _tail(graph, drafts | early)
        first = tail[0]
        source = _token_inputs(first)[0]
        with graph.fx.inserting_before(first):
            selected = graph.call(SELECT, source, rows, origin=source)
        for node in tail:
            node.replace_input_with(source, selected)
            if node.op == "call_function":
                node.meta["type"] = infer_type(node)
        if drafts:
            _select_for_drafts(graph, drafts, rows)
        if early:
            _select_for_exit(graph, early, rows)
        return PassResult(True, Counter({"selected": 1 + bool(drafts) + bool(early)}))


def _select_for_exit(graph: Graph, early: set[fx.Node], rows: fx.Node) -> None:
    """An early exit gives the logits of the same rows, out of a value of all tokens."""
    region = [node for node in graph.nodes if node in early and node.op == "call_function"]
    [source] = {n for node in region for n in _token_inputs(node) if n not in early}
    with graph.fx.inserting_before(region[0]):
        selected = graph.call(SELECT, source, rows, origin=source)
    for node in region:
        node.replace_input_with(source, selected)
        node.meta["type"] = infer_type(node)


def _select_for_drafts(graph: Graph, drafts: set[fx.Node], logit_rows: fx.Node) -> None:
    """Draft heads read some of the logit rows: those behind which there is something to guess."""
    with graph.fx.inserting_after(logit_rows):
        rows = graph.fx.placeholder("draft_rows")
    rows.meta["type"] = TensorType(DRAFT_ROWS, (), torch.int64)
    region = [node for node in graph.nodes if node in drafts and node.op == "call_function"]
    [source] = {n for node in region for n in _token_inputs(node) if n not in drafts}
    with graph.fx.inserting_before(region[0]):
        if _rows(source) != LOGIT_ROWS:
            source_rows = graph.call(SELECT, source, logit_rows, origin=source)
        else:
            source_rows = source
        selected = graph.call(SELECT, source_rows, rows, origin=source)
    for node in region:
        node.replace_input_with(source, selected)
        node.meta["type"] = infer_type(node)


def _token_inputs(node: fx.Node) -> list[fx.Node]:
    return [n for n in node.all_input_nodes if n.op != "get_attr" and _rows(n) is not None]


def _rows(node: fx.Node) -> str | None:
    found = node.meta["type"]
    return found[0].rows if isinstance(found, tuple) else found.rows


def _tail(graph: Graph, drafts: set[fx.Node]) -> list[fx.Node]:
    """The nodes after the selection, in order: a chain with one token input and no other users but `drafts`."""
    tail = [graph.end]
    while True:
        inputs = _token_inputs(tail[0])
        source = inputs[0]
        if source.op == "placeholder" or len(set(source.users) - drafts) > 1 or len(_token_inputs(source)) != 1:
            return tail
        if source.target is operator.getitem or traits_of(source.target).mixes_tokens:
            return tail
        tail.insert(0, source)

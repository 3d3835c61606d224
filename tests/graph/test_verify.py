"""The verifier: each rule has a graph that breaks it, and names the node."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from graph_tracing import aten, icc, trace
from icc.compiler.errors import VerifyError
from icc.compiler.graph.graph import Graph
from icc.compiler.graph.tensor_types import FIXED_INPUTS, LOGIT_ROWS
from icc.compiler.graph.verify import Stage, verify
from icc.runtime.format.batch import BatchArray


def good() -> Graph:
    return trace(lambda x, w: icc.linear.default(aten.exp.default(x), w, None), x="f32[T, 8]", w="f32[4, 8]")


def use_before_definition(graph: Graph) -> None:
    exp = next(n for n in graph.nodes if n.target is aten.exp.default)
    graph.output.append(exp)


def missing_weight(graph: Graph) -> None:
    del graph.weights["w"]


def other_weight_type(graph: Graph) -> None:
    weight = next(n for n in graph.nodes if n.op == "get_attr" and n.target == "w")
    weight.meta["type"] = replace(weight.meta["type"], dtype=torch.bfloat16)


def foreign_op(graph: Graph) -> None:
    graph.output.target = aten.linear.default


def bad_operands(graph: Graph) -> None:
    x, w, _ = graph.output.args
    graph.output.args = (x, w, w)


def wrong_type(graph: Graph) -> None:
    graph.output.meta["type"] = replace(graph.output.meta["type"], shape=(5,))


def lost_rows(graph: Graph) -> None:
    with graph.fx.inserting_after(graph.output):
        node = graph.fx.call_function(aten.view.default, (graph.output, [2, -1]))
    node.meta["type"] = graph.output.meta["type"]


def logits_of_another_shape(graph: Graph) -> None:
    with graph.fx.inserting_before(graph.end):
        graph.returns(logits=graph.call(aten.view.default, graph.output, [-1, 2, 2]))


def logits_without_their_name(graph: Graph) -> None:
    graph.rename_output("logits", "scores")


def an_output_of_no_meaning(graph: Graph) -> None:
    graph.returns(scores=graph.output)


def rows_of_another_input(graph: Graph) -> None:
    for node in graph.nodes:
        if node.op in ("placeholder", "call_function"):
            node.meta["type"] = replace(node.meta["type"], rows=LOGIT_ROWS)


def an_input_that_nobody_declared(graph: Graph) -> None:
    with graph.fx.inserting_before(next(iter(graph.nodes))):
        graph.fx.placeholder("colours").meta["type"] = FIXED_INPUTS["positions"]


def another_type_than_declared(graph: Graph) -> None:
    node = graph.declare(BatchArray("colours", ("T", 3), "bf16"))
    node.meta["type"] = replace(node.meta["type"], dtype=torch.bfloat16)


BROKEN: dict[str, tuple[Callable[[Graph], None], str]] = {
    "uses a value before it is defined": (use_before_definition, "linear_default = icc.linear"),
    "names a weight that the graph does not have": (missing_weight, "w = w"),
    "has another type than its weight": (other_weight_type, "w = w"),
    "is not an op of this stage": (foreign_op, "linear_default = aten.linear"),
    "does not accept its operands": (bad_operands, "linear_default = icc.linear"),
    "has type f32[T, 5], its operands give f32[T, 4]": (wrong_type, "linear_default = icc.linear"),
    "lost the row axis": (lost_rows, "view_default = aten.view"),
    "must return logits with one row per token or logit row": (logits_of_another_shape, "output = output"),
    "must return logits or hidden states, by name": (logits_without_their_name, "output = output"),
    "returns scores, which names no section and no output of one": (an_output_of_no_meaning, "output = output"),
    "has type i64[L], the input is of type i64[T]": (rows_of_another_input, "token_ids = token_ids"),
    "is an input that the graph does not declare": (an_input_that_nobody_declared, "colours = colours"),
    "has type bf16[T, 3], the input is of type f32[T, 3]": (another_type_than_declared, "colours = colours"),
}


@pytest.mark.parametrize("message", BROKEN)
def test_broken(message: str) -> None:
    spoil, node = BROKEN[message]
    graph = good()
    spoil(graph)
    with pytest.raises(VerifyError) as caught:
        verify(graph, Stage.EXPORTED, "some-pass")
    assert message in str(caught.value) and caught.value.node == node
    assert (caught.value.stage, caught.value.pass_name) == (Stage.EXPORTED, "some-pass")


def test_good() -> None:
    verify(good(), Stage.EXPORTED, "some-pass")


def test_optimized_graphs_hold_only_the_dialect() -> None:
    with pytest.raises(VerifyError, match="is not an op of this stage") as caught:
        verify(good(), Stage.OPTIMIZED, "some-pass")
    assert caught.value.node == "exp_default = aten.exp"
    verify(trace(lambda x: icc.rms_norm.default(x, None, 1e-5), x="f32[T, 8]"), Stage.OPTIMIZED, "some-pass")

"""insert-early-exit."""

from __future__ import annotations

import pytest
import torch
from graph_tracing import IDS, Value, apply, aten, attention, difference, icc, trace
from icc.compiler.errors import UsageError
from icc.compiler.graph.graph import Graph
from icc.compiler.graph.interpret import interpret, interpret_outputs
from icc.compiler.ops import AttentionSpec
from icc.passes import pipelines
from icc.passes.attention.select_logit_rows import SelectLogitRows
from icc.passes.base import PassContext
from icc.passes.manager import run_passes
from icc.passes.speculate.insert_early_exit import InsertEarlyExit


def layer(x: Value, number: int, w: Value) -> Value:
    """Attention and a residual product, as a model's layer would be traced."""
    heads = icc.rms_norm.default(x, w, 1e-5).view(-1, 2, 4)
    x = x + attention(heads, heads, heads, AttentionSpec(number, 0.5)).view(-1, 8)
    x = x + aten.tanh.default(x)
    x.node.meta["module"] = f"model.layers.{number}"
    return x


def model(layers: int) -> Graph:
    def fn(x: Value, w: Value, norm: Value, head: Value) -> Value:
        for number in range(layers):
            x = layer(x, number, w)
        return icc.linear.default(icc.rms_norm.default(x, norm, 1e-5), head, None)

    return trace(fn, x="f32[T, 8]", w="f32[8]", norm="f32[8]", head="f32[16, 8]")


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_numbers_are_those_of_a_shorter_model(layers: int) -> None:
    graph = apply(InsertEarlyExit(layers), model(4)).graph
    assert difference(interpret(model(layers), IDS), interpret_outputs(graph, IDS)["exit.logits"]) < 1e-6
    assert torch.equal(interpret(graph, IDS), interpret(model(4), IDS))


def test_rows_are_selected_and_later_passes_keep_the_exit() -> None:
    graph = model(3)
    run_passes(graph, [InsertEarlyExit(2)], PassContext())
    done = apply(SelectLogitRows(), graph)
    assert done.text.count("icc.select_rows(") == 2
    graph = model(3)
    run_passes(graph, [InsertEarlyExit(2), *pipelines.fuse()], PassContext())
    assert difference(interpret(model(2), IDS), interpret_outputs(graph, IDS)["exit.logits"]) < 1e-5


def test_refusals() -> None:
    for layers in (2, 5):
        with pytest.raises(UsageError, match=f"layer-skip:{layers}: the model has 2 layers"):
            run_passes(model(2), [InsertEarlyExit(layers)], PassContext())

    def braided(x: Value, y: Value, w: Value, head: Value) -> Value:
        """Two streams: no single value lies between the layers."""
        for number in range(2):
            x, y = layer(y, number, w), x
        return icc.linear.default(x + y, head, None)

    graph = trace(braided, x="f32[T, 8]", y="f32[T, 8]", w="f32[8]", head="f32[16, 8]")
    with pytest.raises(UsageError, match="where the model's layers end does not show"):
        run_passes(graph, [InsertEarlyExit(1)], PassContext())

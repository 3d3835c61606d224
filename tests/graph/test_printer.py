"""The canonical printer: equal graphs print equally."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from graph_tracing import Value, aten, icc, trace
from icc.compiler.graph.printer import print_graph
from icc.compiler.weights.formats.affine import GroupAffine
from icc.compiler.weights.handles import Constant, RoundedWeight, RowConcat


def block(x: Value, w: Value) -> Value:
    values, _ = icc.topk.default(icc.rms_norm.default(x, None, 1e-5), 4, True)
    return icc.linear.default(values, w, None) * 0.1 + 2


def test_text() -> None:
    graph = trace(block, x="f32[T, 8]", w="bf16[4, 4]")
    assert_expected_inline(
        print_graph(graph),
        """\
graph(%token_ids: i64[T]):
  %0: f32[T, 8] = icc.embedding(%token_ids, @x: f32[16, 8])
  %1: f32[T, 8] = icc.rms_norm(%0, None, 1e-05)
  %2: (f32[T, 4], i64[T, 4]) = icc.topk(%1, 4, True)
  %3: f32[T, 4] = getitem(%2, 0)
  %4: f32[T, 4] = icc.linear(%3, @w: bf16[4, 4], None)
  %5: f32[T, 4] = aten.mul.Tensor(%4, 0.1)
  %6: f32[T, 4] = aten.add.Tensor(%5, 2)
  return %6
""",
    )


def test_names_and_ids_do_not_show() -> None:
    """The text does not depend on nodes created earlier, nor on the names of nodes."""
    first, second = (trace(block, x="f32[T, 8]", w="bf16[4, 4]") for _ in range(2))
    with second.fx.inserting_before(second.output):
        for _ in range(3):
            second.call(aten.exp.default, second.output)
    second.sweep()
    for node in second.nodes:
        if node.op == "call_function":
            node.name = f"other_{node.name}"
    assert print_graph(first) == print_graph(second)


def test_what_differs_shows() -> None:
    texts = {
        print_graph(trace(fn, x=x))
        for fn in (lambda x: x * 2.0, lambda x: x * 3.0, lambda x: x + 2.0)
        for x in ("f32[T, 8]", "f32[T, 4]")
    }
    assert len(texts) == 6


def test_modules() -> None:
    graph = trace(lambda x: x * 2.0, x="f32[T, 8]")
    graph.output.meta["module"] = "model.norm"
    assert "aten.mul.Tensor(%0, 2.0)  # model.norm" in print_graph(graph, modules=True)
    assert "model.norm" not in print_graph(graph)


def test_weights_show_how_they_are_stored() -> None:
    dense = Constant(torch.ones(4, 16, dtype=torch.bfloat16))
    rounded = RoundedWeight(dense, GroupAffine(8, 4))
    shown = [w.describe() for w in (dense, rounded, RowConcat((dense, dense)), RowConcat((rounded, rounded)))]
    assert shown == ["bf16[4, 16]", "q4g8[4, 16]", "bf16[8, 16]", "q4g8[8, 16]"]

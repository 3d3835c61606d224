"""select-logit-rows."""

from __future__ import annotations

from graph_tracing import IDS, Applied, Value, apply, aten, attention, difference, icc, trace
from icc.compiler.graph.interpret import interpret
from icc.compiler.ops import AttentionSpec
from icc.passes.attention.select_logit_rows import SelectLogitRows


def attend(x: Value) -> Value:
    heads = x.view(-1, 2, 4)
    return attention(heads, heads, heads, AttentionSpec(0, 0.5)).view(-1, 8)


def check_rows(done: Applied) -> None:
    """Check that any selected rows in any order are those of the whole logits."""
    whole, rows = interpret(done.graph, IDS), [5, 0, 5, 8]
    assert difference(whole[rows], interpret(done.graph, IDS, rows)) < 1e-6


def test_selected_before_norm_and_head() -> None:
    def fn(x: Value, w: Value, head: Value) -> Value:
        return icc.linear.default(icc.rms_norm.default(x + attend(x), w, 1e-5), head, None)

    done = apply(SelectLogitRows(), trace(fn, x="f32[T, 8]", w="f32[8]", head="f32[16, 8]"))
    assert done.ops[-3:] == ["icc::select_rows", "icc::rms_norm", "icc::linear"]
    check_rows(done)


def test_not_above_attention() -> None:
    done = apply(SelectLogitRows(), trace(lambda x: attend(aten.exp.default(x)), x="f32[T, 8]"))
    assert done.ops[-3:] == ["icc::attention", "icc::select_rows", "aten::view"]
    check_rows(done)


def test_not_where_branches_meet() -> None:
    """A parallel residual: the sum reads two token values."""

    def fn(x: Value, head: Value) -> Value:
        return aten.tanh.default(aten.exp.default(x) + aten.neg.default(x)) / 30.0

    done = apply(SelectLogitRows(), trace(fn, x="f32[T, 8]", head="f32[16, 8]"))
    assert done.ops[-3:] == ["icc::select_rows", "aten::tanh", "aten::div.Tensor"]
    check_rows(done)


def test_one_reader_that_reads_twice() -> None:
    def fn(x: Value) -> Value:
        y = aten.exp.default(x)
        return y * y

    done = apply(SelectLogitRows(), trace(fn, x="f32[T, 8]"))
    assert done.ops == ["icc::select_rows", "icc::embedding", "aten::exp", "aten::mul.Tensor"]
    check_rows(done)


def test_the_logits_themselves() -> None:
    """Nothing after the branches: the logits are selected."""

    def fn(x: Value) -> Value:
        return aten.exp.default(x) + x

    done = apply(SelectLogitRows(), trace(fn, x="f32[T, 8]"))
    assert done.ops[-1] == "icc::select_rows"
    check_rows(done)


def test_several_results() -> None:
    def fn(x: Value) -> Value:
        return icc.topk.default(x, 3, True)[0] * 2.0

    done = apply(SelectLogitRows(), trace(fn, x="f32[T, 8]"))
    assert done.ops[-3:] == ["icc::topk", "icc::select_rows", "aten::mul.Tensor"]
    check_rows(done)

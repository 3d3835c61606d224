"""dead-code."""

from __future__ import annotations

from graph_tracing import Value, apply, aten, trace
from icc.passes.canonicalize.dead_code import DeadCode


def unused(x: Value, w: Value) -> Value:
    aten.exp.default(aten.neg.default(x) * w)
    return aten.silu.default(x)


def test_unused_calls_and_weights_go() -> None:
    done = apply(DeadCode(), trace(unused, keep_dead=True, x="f32[T, 8]", w="f32[8]"))
    assert list(done.graph.weights) == ["x"]


def test_nothing_dead() -> None:
    done = apply(DeadCode(), trace(lambda x: aten.silu.default(x), x="f32[T, 8]"))
    assert done.counts == {}

"""dead-code."""

from __future__ import annotations

from expecttest import assert_expected_inline
from graph_tracing import Value, apply, aten, trace
from icc.passes.canonicalize.dead_code import DeadCode


def unused(x: Value, w: Value) -> Value:
    aten.exp.default(aten.neg.default(x) * w)
    return aten.silu.default(x)


def test_unused_calls_and_weights_go() -> None:
    done = apply(DeadCode(), trace(unused, keep_dead=True, x="f32[T, 8]", w="f32[8]"))
    assert_expected_inline(
        done.text,
        """\
graph(%token_ids: i64[T]):
  %0: f32[T, 8] = icc.embedding(%token_ids, @x: f32[16, 8])
  %1: f32[T, 8] = aten.neg(%0)
  %2: f32[T, 8] = aten.mul.Tensor(%1, @w: f32[8])
  %3: f32[T, 8] = aten.exp(%2)
  %4: f32[T, 8] = aten.silu(%0)
  return %4
-- dead-code
graph(%token_ids: i64[T]):
  %0: f32[T, 8] = icc.embedding(%token_ids, @x: f32[16, 8])
  %1: f32[T, 8] = aten.silu(%0)
  return %1
""",
    )
    assert list(done.graph.weights) == ["x"]


def test_nothing_dead() -> None:
    done = apply(DeadCode(), trace(lambda x: aten.silu.default(x), x="f32[T, 8]"))
    assert done.counts == {}

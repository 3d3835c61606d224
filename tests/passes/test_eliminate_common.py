"""eliminate-common."""

from __future__ import annotations

from graph_tracing import Value, apply, aten, attention, trace
from icc.compiler.ops import AttentionSpec
from icc.passes.canonicalize.eliminate_common import EliminateCommon


def test_lists_and_weights_are_compared() -> None:
    def fn(x: Value, w: Value) -> Value:
        return x.view(-1, 2, 4) * w + x.view(-1, 2, 4) * w + x.view(-1, 4, 2).view(-1, 2, 4)

    assert apply(EliminateCommon(), trace(fn, x="f32[T, 8]", w="f32[2, 4]")).counts == {"merged": 2}


def test_number_types_differ() -> None:
    """1 and 1.0 are equal in Python, but products with them may differ in type."""

    def fn(x: Value) -> Value:
        mask = aten.gt.Scalar(x, 0.0)
        return mask * 1 + mask * 1.0

    assert apply(EliminateCommon(), trace(fn, x="f32[T, 8]")).counts == {}


def test_each_attention_keeps_its_cache() -> None:
    def fn(q: Value, positions: Value) -> Value:
        one, two = (attention(q, q, q, AttentionSpec(0, 0.5)) for _ in range(2))
        return one + two

    assert apply(EliminateCommon(), trace(fn, q="f32[T, 2, 4]", positions="")).counts == {}

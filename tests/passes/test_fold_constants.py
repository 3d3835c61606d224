"""fold-constants."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from graph_tracing import IDS, Value, apply, aten, cat, difference, icc, trace
from icc.compiler.graph.interpret import interpret
from icc.compiler.weights.handles import Constant, Derived
from icc.passes.base import PassContext
from icc.passes.canonicalize.fold_constants import FoldConstants


def test_one_plus_weight() -> None:
    """Gemma's norms scale by 1 + w."""
    done = apply(FoldConstants(), trace(lambda x, w: x * (w + 1.0), x="f32[T, 8]", w="f32[8]"))
    assert_expected_inline(
        done.text,
        """\
graph(%token_ids: i64[T]):
  %0: f32[T, 8] = icc.embedding(%token_ids, @x: f32[16, 8])
  %1: f32[8] = aten.add.Tensor(@w: f32[8], 1.0)
  %2: f32[T, 8] = aten.mul.Tensor(%0, %1)
  return %2
-- fold-constants
graph(%token_ids: i64[T]):
  %0: f32[T, 8] = icc.embedding(%token_ids, @x: f32[16, 8])
  %1: f32[T, 8] = aten.mul.Tensor(%0, @w#2: f32[8])
  return %1
""",
    )


def test_moved_weights_keep_their_storage_type() -> None:
    """GPT-2 stores its matrices transposed."""

    def linear(x: Value, w: Value) -> Value:
        return icc.linear.default(x, aten.permute.default(w, [1, 0]), None)

    done = apply(FoldConstants(), trace(linear, x="f32[T, 8]", w="bf16[8, 4]"))
    assert_expected_inline(
        done.text,
        """\
graph(%token_ids: i64[T]):
  %0: f32[T, 8] = icc.embedding(%token_ids, @x: f32[16, 8])
  %1: f32[4, 8] = aten.permute(@w: bf16[8, 4], [1, 0])
  %2: f32[T, 4] = icc.linear(%0, %1, None)
  return %2
-- fold-constants
graph(%token_ids: i64[T]):
  %0: f32[T, 8] = icc.embedding(%token_ids, @x: f32[16, 8])
  %1: f32[T, 4] = icc.linear(%0, @w#2: bf16[4, 8], None)
  return %1
""",
    )


def test_views_of_permuted_weights() -> None:
    """Torch's own view refuses these strides."""

    def turned(x: Value, w: Value) -> Value:
        return x * aten.view.default(aten.permute.default(w, [1, 0]), [8])

    done = apply(FoldConstants(), trace(turned, x="f32[T, 8]", w="f32[4, 2]"))
    assert done.counts == {"folded": 2}


def test_several_sources() -> None:
    done = apply(
        FoldConstants(),
        trace(lambda x, a, b: x + cat([a, b], 0) * cat([b, a], 0), x="f32[T, 8]", a="f32[3]", b="f32[5]"),
    )
    assert done.counts == {"folded": 3} and len(done.graph.weights) == 2


def test_the_values_are_not_computed() -> None:
    """A compile streams: the folded weight loads its source when it is loaded."""
    loads: list[int] = []

    class Counting(Constant):
        def load(self) -> torch.Tensor:
            loads.append(1)
            return super().load()

    graph = trace(lambda x, w: x * (w + 1.0), x="f32[T, 8]", w=Counting(torch.ones(8)))
    FoldConstants().run(graph, PassContext())
    graph.sweep()
    assert not loads
    assert isinstance(graph.weights["w#2"], Derived)
    plain = trace(lambda x: x * 2.0, x="f32[T, 8]")
    assert difference(interpret(plain, IDS), interpret(graph, IDS)) == 0 and loads == [1]


def test_token_values_stay() -> None:
    done = apply(FoldConstants(), trace(lambda x, w: aten.exp.default(x) * w, x="f32[T, 8]", w="f32[8]"))
    assert done.counts == {}

"""fold-constants."""

from __future__ import annotations

import torch
from graph_tracing import IDS, Value, apply, aten, cat, difference, icc, trace
from icc.compiler.graph.interpret import interpret
from icc.compiler.weights.formats.blocks import grouped
from icc.compiler.weights.handles import Constant, Derived, GivenRows, PackedWeight
from icc.passes.base import PassContext
from icc.passes.canonicalize.fold_constants import FoldConstants


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
    """A compile streams weights: a folded weight loads its source only when it is loaded itself."""
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


def test_blocks_that_a_product_turns_and_turns_back_stay_as_they_are() -> None:
    """x @ w.T with a matrix that the checkpoint stores in blocks, as Falcon's layers write it."""
    parts = {
        "codes": torch.zeros(8, 32, dtype=torch.uint8),
        "scales": torch.ones(8, 2),
        "zeros": torch.zeros(8, 2, dtype=torch.uint8),
    }
    given = GivenRows((PackedWeight.pack(parts, grouped(4, 16), (8, 32)),))

    def fn(x: Value, w: Value) -> Value:
        turned = aten.permute.default(w, [1, 0])
        return icc.linear.default(x, aten.permute.default(turned, [1, 0]), None)

    done = apply(FoldConstants(), trace(fn, x="f32[T, 32]", w=given))
    found = {weight.describe() for weight in done.graph.weights.values()}
    assert "zq4g16[8, 32]" in found and found.isdisjoint({"f32[8, 32]", "f32[32, 8]"})

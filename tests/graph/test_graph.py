"""The graph, its interpreter and its weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from graph_tracing import IDS, VOCAB, Value, aten, difference, icc, random, trace
from icc.compiler.graph.interpret import interpret
from icc.compiler.graph.tensor_types import TensorType, type_of
from icc.compiler.weights.formats.affine import GroupAffine
from icc.compiler.weights.formats.dense import F32
from icc.compiler.weights.handles import (
    Constant,
    Derived,
    PackedWeight,
    RoundedWeight,
    RowConcat,
    Weight,
    derive,
)
from torch import Tensor, fx


class Counting(Constant):
    """A constant that counts its loads."""

    loads = 0

    def load(self) -> Tensor:
        self.loads += 1
        return super().load()


def test_types_are_inferred_without_the_row_axis() -> None:
    graph = trace(lambda x: icc.topk.default(x, 2, True)[1], x="f32[T, 3, 8]")
    topk = next(n for n in graph.nodes if n.target is icc.topk.default)
    values, indices = topk.meta["type"]
    assert values == TensorType("tokens", (3, 2), torch.float32) and indices.dtype == torch.int64
    assert (values.rank, values.full_shape, str(values)) == (3, (-1, 3, 2), "f32[T, 3, 2]")
    with pytest.raises(AssertionError, match="several results"):
        type_of(topk)


def test_the_row_axis_may_not_be_lost() -> None:
    with pytest.raises(AssertionError, match="lost the row axis"):
        trace(lambda x: aten.permute.default(x, [1, 0]), x="f32[T, 8]")


def test_weight_names_are_unique_by_handle() -> None:
    graph = trace(lambda x: x * 2.0, x="f32[T, 8]")
    one, two = Constant(torch.ones(8)), Constant(torch.zeros(8))
    with graph.fx.inserting_before(graph.output):
        names = [str(graph.add_weight("w", weight).target) for weight in (one, two, one, two)]
    assert names == ["w", "w#2", "w", "w#2"]


def test_sweep_removes_nodes_and_weights_without_readers() -> None:
    graph = trace(lambda x, w: (aten.exp.default(x * w), x)[1], keep_dead=True, x="f32[T, 8]", w="f32[8]")
    assert graph.sweep() == 3 and list(graph.weights) == ["x"] and graph.sweep() == 0


def test_interpret_is_eager_torch() -> None:
    def fn(x: Value, w: Value) -> Value:
        return icc.linear.default(aten.silu.default(x), w, None)

    graph = trace(fn, x="f32[T, 8]", w="bf16[4, 8]")
    x, w = random("x", (VOCAB, 8))[IDS], random("w", (4, 8), torch.bfloat16).float()
    assert difference(torch.nn.functional.silu(x) @ w.T, interpret(graph, IDS)) < 1e-6


def test_views_of_strided_values() -> None:
    """In the IR every value is dense; torch's own view would refuse."""

    def fn(x: Value) -> Value:
        return aten.permute.default(x, [0, 2, 1]).view(-1, 8)

    found = interpret(trace(fn, x="f32[T, 2, 4]"), IDS)
    assert torch.equal(found, random("x", (VOCAB, 2, 4))[IDS].transpose(1, 2).reshape(-1, 8))


def test_the_observer_sees_each_call_with_its_operands() -> None:
    seen: list[tuple[str, tuple[Any, ...]]] = []
    graph = trace(lambda x, w: aten.exp.default(x * w), x="f32[T, 8]", w="f32[8]")

    def observe(node: fx.Node, args: tuple[Any, ...]) -> None:
        seen.append((node.name, args))

    out = interpret(graph, IDS, observer=observe)
    assert [name for name, _ in seen] == ["embedding_default", "mul_tensor", "exp_default"]
    assert torch.equal(seen[0][1][0], torch.tensor(IDS)) and torch.equal(seen[1][1][1], random("w", (8,)))
    assert torch.equal(out, seen[2][1][0].exp())


def test_one_weight_at_a_time_is_loaded() -> None:
    weights = {n: Counting(torch.eye(8)) for n in "abc"}

    def fn(x: Value, **rest: Value) -> Value:
        for weight in rest.values():
            x = icc.linear.default(x, weight, None)
        return x

    interpret(trace(fn, x="f32[T, 8]", **weights), IDS)
    assert [w.loads for w in weights.values()] == [1, 1, 1]


def test_derived_weights_are_lazy() -> None:
    source = Counting(torch.arange(6.0, dtype=torch.bfloat16).view(2, 3))
    made = derive(lambda w: w.t().contiguous(), derive(lambda w: w * 2, source))
    assert (made.shape, made.dtype, source.loads) == ((3, 2), torch.bfloat16, 0)
    assert torch.equal(made.load(), source.value.t() * 2) and source.loads == 1
    made.load()
    assert source.loads == 2, "values are not held on to"


def test_a_derived_weight_must_keep_its_word() -> None:
    wrong: Weight = Derived(lambda w: w[:1], (Constant(torch.ones(4)),), (4,), torch.float32)
    with pytest.raises(AssertionError, match=r"has shape \(1,\), not \(4,\)"):
        wrong.load()


def test_row_concat() -> None:
    parts = (Constant(torch.ones(2, 4)), Constant(torch.zeros(3, 4)))
    joined = RowConcat(parts)
    assert joined.shape == (5, 4) and torch.equal(joined.load(), torch.cat([p.value for p in parts]))
    for other in (Constant(torch.ones(2, 5)), Constant(torch.ones(2, 4, dtype=torch.float16))):
        with pytest.raises(AssertionError, match="rows differ"):
            RowConcat((parts[0], other))


def test_joined_rows_are_stored_as_their_pieces_are() -> None:
    q4, q8 = GroupAffine(8, 4), GroupAffine(8, 8)
    one, two = (RoundedWeight(Constant(random(n, (3, 16))), q4) for n in "ab")
    joined = RowConcat((one, two))
    assert joined.storage == q4 and torch.equal(joined.load(), torch.cat([one.load(), two.load()]))
    assert torch.equal(q4.decode(joined.parts()), joined.load())
    for other in (RoundedWeight(one.source, q8), Constant(torch.ones(1, 16))):
        mixed = RowConcat((one, other))
        assert mixed.storage == F32 and torch.equal(mixed.parts()["values"], mixed.load())
    assert one.source.storage == F32


@pytest.mark.parametrize("bits", [4, 8])
def test_packed_codes_read_back(bits: int) -> None:
    form = GroupAffine(16, bits)
    parts = RoundedWeight(Constant(random("w", (5, 32))), form).parts()
    packed = PackedWeight.pack(parts, form, (5, 32))
    assert packed.shape == (5, 32) and torch.equal(packed.load(), form.decode(parts))

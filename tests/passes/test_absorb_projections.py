"""absorb-projections."""

from __future__ import annotations

from collections.abc import Callable

import torch
from graph_tracing import Applied, Value, apply, aten, attention, icc, random, trace
from icc.compiler.ops import OPS, AttentionSpec
from icc.compiler.weights.formats.affine import GroupAffine
from icc.compiler.weights.handles import GatheredRows, PackedWeight, Weight, is_quantized
from icc.passes.attention.absorb_projections import AbsorbProjections

HEADS, NOPE, ROPE, VALUES, RANK = 4, 8, 4, 6, 16
linear = icc.linear.default
Make = Callable[..., Value]
INPUTS = {"q": "f32[T, 4, 12]", "c": "f32[T, 16]", "r": "f32[T, 1, 4]"}


def run(make: Make, **inputs: str | Weight) -> Applied:
    given = {name: INPUTS[name] for name in ("q", "c", "r")} | inputs
    return apply(AbsorbProjections(), trace(make, **given))


def attend(q: Value, k: Value, v: Value) -> Value:
    return attention(q, k, v, AttentionSpec(0, 0.5))


def rotated(r: Value) -> Value:
    return aten.expand.default(r, [-1, HEADS, ROPE])


def latent(q: Value, c: Value, r: Value, w: Value) -> Value:
    """DeepSeek's attention: keys and values of a head beside each other, the shared part last."""
    both = linear(c, w, None).view(-1, HEADS, NOPE + VALUES)
    k = aten.cat.default([both.slice(2, 0, NOPE), rotated(r)], 2)
    return attend(q, k, both.slice(2, NOPE, NOPE + VALUES))


def shapes(done: Applied) -> list[tuple[int, ...]]:
    """The shapes of the operands of attention."""
    [node] = done.graph.attention_nodes
    return [x.meta["type"].shape for x in node.args[:3]]  # type: ignore[union-attr]


WEIGHT = f"f32[{HEADS * (NOPE + VALUES)}, {RANK}]"


def test_the_cache_holds_the_row_once() -> None:
    done = run(latent, w=WEIGHT)
    assert done.counts == {"absorbed": 1}
    assert shapes(done) == [(HEADS, RANK + ROPE), (1, RANK + ROPE), (1, RANK)]
    assert done.ops.count("icc::expert_linear") == 2 and "icc::linear" not in done.ops


def test_any_order_and_several_layers() -> None:
    def fn(q: Value, c: Value, r: Value, keys: Value, values: Value) -> Value:
        k = linear(c, keys, None).view(-1, NOPE, HEADS)
        k = aten.cat.default([rotated(r), aten.permute.default(k, [0, 2, 1])], 2)
        return attend(q, k, linear(c.view(-1, 1, RANK), values, None).view(-1, HEADS, VALUES))

    done = run(fn, keys=f"f32[{HEADS * NOPE}, {RANK}]", values=f"f32[{HEADS * VALUES}, {RANK}]")
    assert done.counts == {"absorbed": 1} and shapes(done)[1] == (1, RANK + ROPE)


def test_nothing_needs_to_be_shared() -> None:
    def fn(q: Value, c: Value, r: Value, w: Value) -> Value:
        both = linear(c, w, None).view(-1, HEADS, 12 + VALUES)
        return attend(q * r.slice(2, 0, 1), both.slice(2, 0, 12), both.slice(2, 12, 12 + VALUES))

    done = run(fn, w=f"f32[{HEADS * (12 + VALUES)}, {RANK}]")
    assert done.counts == {"absorbed": 1} and shapes(done)[1] == (1, RANK)


def test_rows_that_are_stored_in_codes_stay_so() -> None:
    coded = GroupAffine(16, 4)
    values = random("w", (HEADS * (NOPE + VALUES), RANK))

    packed = PackedWeight.pack(coded.encode(values).parts, coded, values.shape)
    done = run(latent, w=packed)
    assert done.counts == {"absorbed": 1}
    stored = {name.rsplit(".", 1)[-1]: weight for name, weight in done.graph.weights.items()}
    assert isinstance(stored["values"], GatheredRows) and not is_quantized(stored["keys"])
    assert torch.equal(stored["values"].load(), packed.load().view(HEADS, -1, RANK)[:, NOPE:])
    assert torch.equal(stored["keys"].load(), packed.load().view(HEADS, -1, RANK)[:, :NOPE].mT.half())


def test_refusals() -> None:
    def biased(q: Value, c: Value, r: Value, w: Value, b: Value) -> Value:
        both = linear(c, w, b).view(-1, HEADS, NOPE + VALUES)
        return attend(q, aten.cat.default([both.slice(2, 0, NOPE), rotated(r)], 2), both.slice(2, NOPE, NOPE + VALUES))

    def grouped(q: Value, c: Value, r: Value, w: Value) -> Value:
        return latent(aten.cat.default([q, q], 1), c, r, w)

    assert run(biased, w=WEIGHT, b="f32[56]").reasons == ["the products have a bias"]
    assert run(grouped, w=WEIGHT).reasons == ["query heads share keys that are products of one row"]
    large = run(latent, c="f32[T, 24]", w=f"f32[{HEADS * (NOPE + VALUES)}, 24]")
    assert large.counts == {} and "28 numbers per token instead of 72" in large.reasons[0]


def test_other_attention_is_left_alone() -> None:
    def two_rows(q: Value, c: Value, r: Value, k: Value, v: Value) -> Value:
        keys = aten.cat.default([linear(c, k, None).view(-1, HEADS, NOPE), rotated(r)], 2)
        return attend(q, keys, linear(c * 2.0, v, None).view(-1, HEADS, VALUES))

    done = run(two_rows, k=f"f32[{HEADS * NOPE}, {RANK}]", v=f"f32[{HEADS * VALUES}, {RANK}]")
    assert done.counts == {} and done.reasons == []
    assert OPS["attention"].overload in {node.target for node in done.graph.nodes}

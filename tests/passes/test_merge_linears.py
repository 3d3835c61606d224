"""merge-linears."""

from __future__ import annotations

from graph_tracing import Value, apply, aten, icc, random, trace
from icc.compiler.weights.formats.affine import GroupAffine
from icc.compiler.weights.handles import Constant, RoundedWeight, RowConcat
from icc.passes.fuse.merge_linears import MergeLinears

linear = icc.linear.default


def gate_up(x: Value, gate: Value, up: Value) -> Value:
    return aten.silu.default(linear(x, gate, None)) * linear(x, up, None)


def test_qkv_of_different_sizes_and_biases() -> None:
    def fn(x: Value, q: Value, k: Value, v: Value, qb: Value, vb: Value) -> Value:
        return linear(x, q, qb).slice(1, 0, 4) * linear(x, k, None) + linear(x, v, vb)

    inputs = {"q": "bf16[8, 8]", "k": "bf16[4, 8]", "v": "bf16[4, 8]", "qb": "bf16[8]", "vb": "bf16[4]"}
    done = apply(MergeLinears(), trace(fn, x="f32[T, 8]", **inputs))
    assert done.counts == {"merged": 3} and done.ops.count("icc::linear") == 1
    bias = done.graph.weights["q+k+v.bias"]
    assert isinstance(bias, RowConcat) and bias.shape == (16,) and bool((bias.load()[8:12] == 0).all())


def test_with_a_row_axis_of_heads() -> None:
    done = apply(MergeLinears(), trace(gate_up, x="f32[T, 3, 8]", gate="f32[4, 8]", up="f32[4, 8]"))
    assert done.counts == {"merged": 2}


def test_refuses_different_storage() -> None:
    gate = RoundedWeight(Constant(random("gate", (4, 16))), GroupAffine(16, 4))
    done = apply(MergeLinears(), trace(gate_up, x="f32[T, 16]", gate=gate, up="bf16[4, 16]"))
    assert done.counts == {} and done.reasons == ["stored differently: ['bf16', 'q4g16']"]


def test_the_alike_are_merged_all_the_same() -> None:
    def fn(x: Value, a: Value, b: Value, c: Value) -> Value:
        return linear(x, a, None) * linear(x, b, None) + linear(x, c, None)

    rounded = {n: RoundedWeight(Constant(random(n, (4, 16))), GroupAffine(8, 4)) for n in "ac"}
    done = apply(MergeLinears(), trace(fn, x="f32[T, 16]", b="bf16[4, 16]", **rounded))
    assert done.counts == {"merged": 2} and "a+c" in done.graph.weights and len(done.reasons) == 1


def test_other_inputs_stay_apart() -> None:
    def fn(x: Value, a: Value, b: Value) -> Value:
        return linear(x, a, None) * linear(x * 2.0, b, None)

    assert apply(MergeLinears(), trace(fn, x="f32[T, 8]", a="f32[4, 8]", b="f32[4, 8]")).counts == {}

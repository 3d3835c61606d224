"""sort-columns."""

from __future__ import annotations

import pytest
import torch
from graph_tracing import Value, apply, aten, icc, trace
from icc.compiler.weights.formats.blocks import grouped
from icc.compiler.weights.handles import GivenRows, PackedWeight, SortedColumns
from icc.passes.fuse.sort_columns import SortColumns

linear, experts = icc.linear.default, icc.expert_linear.default
ORDER = torch.randperm(32, generator=torch.Generator().manual_seed(3))


def given(seed: int, n: int, k: int) -> GivenRows:
    """A random quantized matrix of a checkpoint, with permuted columns."""
    form, rng = grouped(4, 16), torch.Generator().manual_seed(seed)
    parts = {
        "codes": torch.randint(0, 16, (n, k), generator=rng, dtype=torch.uint8),
        "scales": torch.rand(n, k // 16, generator=rng),
        "zeros": torch.randint(0, 16, (n, k // 16), generator=rng, dtype=torch.uint8),
    }
    return GivenRows((PackedWeight.pack(parts, form, (n, k)),))


def down(seed: int = 9) -> SortedColumns:
    return SortedColumns(given(seed, 8, 32), ORDER)


def test_layers_that_read_one_value_share_the_step() -> None:
    def fn(x: Value, a: Value, b: Value) -> Value:
        return linear(x, a, None) * linear(x, b, None)

    done = apply(SortColumns(), trace(fn, x="f32[T, 32]", a=down(1), b=down(2)))
    assert done.counts == {"columns": 2} and done.ops.count("icc::columns") == 1
    assert {w.describe() for w in done.graph.weights.values()} >= {"zq4g16[8, 32]"}


def test_rows_of_producers_are_put_in_order() -> None:
    def fn(x: Value, gate: Value, up: Value, bias: Value, scale: Value, w: Value) -> Value:
        hidden = aten.silu.default(linear(x, gate, None)) * linear(x, up, bias) * scale
        return linear(hidden, w, None)

    weights = {"gate": given(1, 32, 16), "up": "bf16[32, 16]", "bias": "f32[32]", "scale": "f32[32]", "w": down()}
    done = apply(SortColumns(), trace(fn, x="f32[T, 16]", **weights))
    assert done.counts == {"folded": 1} and "icc::columns" not in done.ops
    assert {w.storage.name for w in done.graph.weights.values()} == {"zq4g16", "bf16", "f32"}


def test_halves_of_one_layer_are_put_in_order() -> None:
    def fn(x: Value, both: Value, w: Value) -> Value:
        y = linear(x, both, None)
        return linear(aten.silu.default(y.slice(1, 0, 32)) * y.slice(1, 32, 64), w, None)

    done = apply(SortColumns(), trace(fn, x="f32[T, 16]", both=given(1, 64, 16), w=down()))
    assert done.counts == {"folded": 1}


def test_refuses_what_others_read() -> None:
    def fn(x: Value, up: Value, w: Value, other: Value) -> Value:
        hidden = aten.relu.default(linear(x, up, None))
        return linear(hidden, w, None) + linear(hidden, other, None)

    done = apply(SortColumns(), trace(fn, x="f32[T, 16]", up=given(1, 32, 16), w=down(), other="f32[8, 32]"))
    assert done.counts == {"columns": 1} and done.reasons == ["linear_default_2 reads it in the order that it has"]


def test_refuses_halves_that_overlap_and_what_is_no_result_of_a_layer() -> None:
    def fn(x: Value, both: Value, w: Value, v: Value) -> Value:
        y = linear(x, both, None)
        return linear(y.slice(1, 0, 32) * y.slice(1, 16, 48), w, None) + linear(x, v, None)

    done = apply(SortColumns(), trace(fn, x="f32[T, 32]", both=given(1, 48, 32), w=down(), v=down(2)))
    assert done.counts == {"columns": 2}
    assert done.reasons[0].endswith("overlap") and "not made element by element" in done.reasons[1]


def of_experts(seed: int, n: int, k: int, parts: int) -> SortedColumns:
    """Matrices of three experts; each part of each has its own order of columns."""
    own = [given(seed + e, n, k).parts() for e in range(3)]
    joined = {name: torch.stack([part[name] for part in own]) for name in own[0]}
    whole = GivenRows((PackedWeight.pack(joined, grouped(4, 16), (3, n, k)),))
    rng = torch.Generator().manual_seed(seed)
    return SortedColumns(
        whole, torch.stack([torch.randperm(k, generator=rng) for _ in range(3 * parts)]).view(3, parts, k)
    )


@pytest.mark.parametrize("parts", [1, 2])
def test_experts_each_in_an_order_of_its_own(parts: int) -> None:
    """Rows of gate and up have the order of down's columns; x is permuted for each expert."""

    def fn(x: Value, both: Value, bias: Value, w: Value, picked: Value) -> Value:
        index = icc.topk.default(linear(x, picked, None), 2, True)[1]
        y = experts(x, both, bias, index)
        hidden = aten.silu.default(y.slice(2, 0, 32)) * y.slice(2, 32, 64)
        return experts(hidden, w, None, index)

    weights = {"both": of_experts(1, 64, 16, parts), "w": of_experts(5, 8, 32, 1)}
    done = apply(SortColumns(), trace(fn, x="f32[T, 16]", bias="f32[3, 64]", picked="f32[3, 16]", **weights))
    assert done.counts == {"folded": 1, "columns": parts} and done.ops.count("icc::expert_columns") == parts
    assert {w.storage.name for w in done.graph.weights.values()} == {"zq4g16", "f32", "i32"}
    assert "aten::cat" not in done.ops

"""Which weights are quantized and how, and the reasons for those that are not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from icc.compiler.errors import UsageError
from icc.compiler.graph.graph import Graph
from icc.compiler.graph.interpret import interpret
from icc.compiler.weights.handles import QuantizedWeight
from icc.passes.base import PassContext
from icc.passes.manager import run_passes
from icc.passes.quantize.rtn import QuantizeRtn

IDS = [3, 17, 4, 44, 9, 2]


def storage(graph: Graph) -> dict[str, str]:
    return {name: w.describe() for name, w in graph.weights.items() if isinstance(w, QuantizedWeight)}


def reasons(ctx: PassContext) -> dict[str, str]:
    return {refusal.node: refusal.reason for refusal in ctx.refusals if refusal.rule == "quantize"}


def small(b) -> Graph:
    """embed -> norm -> up (K 256) -> relu -> down (K 96) -> narrow (K 40) -> head."""
    x = b.op("rms_norm", b.embed(256), b.weight("norm", 256, scale=1.0), 1e-6)
    h = b.aten("relu", b.linear(x, "mlp.up.weight", 96, 256))
    h = b.aten("relu", b.linear(h, "mlp.down.weight", 40, 96))
    h = b.aten("relu", b.linear(h, "mlp.narrow.weight", 64, 40))
    h = b.op("rms_norm", h, b.weight("norm2", 64, scale=1.0), 1e-6)
    return b.finish(b.aten("mul.Tensor", b.aten("tanh", b.linear(h, "lm_head.weight", 48, 64)), 3.0))


def test_groups_head_and_small_k(builder) -> None:
    graph, ctx = small(builder), PassContext()
    (report,) = run_passes(graph, [QuantizeRtn()], ctx)
    assert storage(graph) == {
        "mlp.up.weight": "q4g128[96, 256]",
        "mlp.down.weight": "q4g32[40, 96]",
        "lm_head.weight": "q8g64[48, 64]",
    }
    assert reasons(ctx) == {"mlp.narrow.weight": "K = 40 is not a multiple of 16"}
    assert report.counts == {"quantized": 3}
    records = {r.name: r for r in ctx.quant_records}
    assert records["mlp.up.weight"].as_json() == {
        "name": "mlp.up.weight",
        "method": "rtn",
        "format": "q4g128",
        "scaled": False,
        "weight_snr_db": pytest.approx(20, abs=3),
        "output_snr_db": None,
    }


def test_group_sizes_that_are_asked_for(builder) -> None:
    graph = small(builder)
    with pytest.raises(UsageError, match=r"--group-size 128 does not divide the 96 inputs of mlp\.down\.weight"):
        run_passes(graph, [QuantizeRtn(any_group=False)], PassContext())
    run_passes(graph, [QuantizeRtn(group=32, any_group=False)], PassContext())
    assert set(storage(graph).values()) == {"q4g32[96, 256]", "q4g32[40, 96]", "q8g32[48, 64]"}


@pytest.mark.parametrize(("head", "expected"), [(None, None), ("q8", "q8g64[48, 64]"), ("q4", "q4g64[48, 64]")])
def test_head_setting(builder, head, expected) -> None:
    graph, ctx = small(builder), PassContext()
    run_passes(graph, [QuantizeRtn(head=head)], ctx)
    assert storage(graph).get("lm_head.weight") == expected
    assert ("lm_head.weight" in reasons(ctx)) == (expected is None)


def test_keep(builder) -> None:
    graph, ctx = small(builder), PassContext()
    run_passes(graph, [QuantizeRtn(keep=("*.up", "lm_*"))], ctx)
    assert set(storage(graph)) == {"mlp.down.weight"}
    assert reasons(ctx)["mlp.up.weight"] == "kept by --keep *.up"
    assert reasons(ctx)["lm_head.weight"] == "kept by --keep lm_*"


def test_keep_that_matches_nothing_is_an_error(builder) -> None:
    with pytest.raises(UsageError, match=r"'\*q_prj\*' matches no linear layer"):
        run_passes(small(builder), [QuantizeRtn(keep=("*q_prj*",))], PassContext())


def test_second_run_changes_nothing(builder) -> None:
    graph = small(builder)
    run_passes(graph, [QuantizeRtn()], PassContext())
    (report,) = run_passes(graph, [QuantizeRtn()], PassContext())
    assert not report.modified


def tables(graph: Graph) -> list[str]:
    """The weight that the token embedding reads."""
    found = [str(n.args[1].target) for n in graph.nodes if "embedding" in str(n.target)]
    return found[:1]  # other embeddings hold positions


def test_an_int8_head_and_the_embedding_tied_to_it_are_one_weight(traced: Callable[[str], Graph]) -> None:
    graph, ids = traced("llama"), list(range(3, 25))
    before = interpret(graph, ids)
    run_passes(graph, [QuantizeRtn(keep=("model.layers.*",))], PassContext())
    assert [graph.weights[name].describe() for name in tables(graph)] == ["q8g64[120, 64]"]
    assert sum(weight.shape == (120, 64) for weight in graph.weights.values()) == 1
    assert (interpret(graph, ids) - before).abs().max() < 0.02 * before.abs().max()


def test_any_other_head_leaves_the_embedding_as_it_is_stored(traced: Callable[[str], Graph]) -> None:
    graph = traced("llama")
    before = {n: w for n, w in graph.weights.items()}
    run_passes(graph, [QuantizeRtn(head="q4")], PassContext())
    assert all(graph.weights[name] is before[name] for name in tables(graph))
    assert "q4g64[120, 64]" in storage(graph).values()


def test_router_is_left_alone_and_experts_are_not(traced: Callable[[str], Graph]) -> None:
    graph, ctx = traced("mixtral"), PassContext()
    ids = list(range(3, 25))
    before = interpret(graph, ids)
    run_passes(graph, [QuantizeRtn()], ctx)
    found = storage(graph)
    assert found["model.layers.0.mlp.experts.gate_up_proj"] == "q4g64[4, 192, 64]"
    assert found["model.layers.0.mlp.experts.down_proj"] == "q4g32[4, 64, 96]"
    assert reasons(ctx) == {f"model.layers.{i}.mlp.gate.weight": "router: its outputs choose experts" for i in (0, 1)}
    after = interpret(graph, ids)
    assert not torch.equal(after, before)
    assert torch.nn.functional.cosine_similarity(before, after).mean() > 0.8


def test_shared_weight_is_stored_once(builder) -> None:
    b = builder
    weight = b.weight("shared.weight", 64, 64)
    h = b.embed(64)
    for _ in range(2):
        h = b.aten("tanh", b.op("linear", h, weight, None))
    graph = b.finish(b.linear(b.aten("tanh", h), "head", 48, 64))
    ctx = PassContext()
    run_passes(graph, [QuantizeRtn()], ctx)
    assert [r.name for r in ctx.quant_records] == ["shared.weight", "head"]
    assert storage(graph)["shared.weight"] == "q4g64[64, 64]"


def test_computed_weight_is_named(builder) -> None:
    b = builder
    wide = b.aten("permute", b.weight("w", 64, 32), [1, 0])
    graph = b.finish(b.linear(b.aten("tanh", b.op("linear", b.embed(64), wide, None)), "head", 48, 32))
    ctx = PassContext()
    run_passes(graph, [QuantizeRtn()], ctx)
    assert list(reasons(ctx).values()) == ["its weight is computed in the graph, not stored"]

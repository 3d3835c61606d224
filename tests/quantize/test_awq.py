"""AWQ: the float function never changes, errors fall if channels are uneven, and results are reproducible."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from icc.compiler.graph.graph import Graph
from icc.compiler.graph.interpret import interpret
from icc.compiler.weights.handles import QuantizedWeight
from icc.passes.base import PassContext
from icc.passes.manager import run_passes
from icc.passes.quantize.awq import QuantizeAwq
from icc.passes.quantize.rtn import QuantizeRtn
from sizes import soak

TEXT = [torch.randint(0, 48, (24,), generator=torch.Generator().manual_seed(i)).tolist() for i in range(6)]
HELD_OUT = torch.randint(0, 48, (40,), generator=torch.Generator().manual_seed(99)).tolist()


def uneven(b) -> Graph:
    """A gated MLP whose inputs have a few channels that are far larger than the others."""
    scale = torch.ones(64)
    scale[[3, 17, 40]] = 25.0
    x = b.op("rms_norm", b.embed(64), b.constant("norm", scale), 1e-6)
    gate = b.aten("silu", b.linear(x, "gate", 96, 64))
    h = b.linear(b.aten("mul.Tensor", gate, b.linear(x, "up", 96, 64)), "down", 64, 96)
    return b.finish(b.linear(b.aten("tanh", h), "head", 48, 64))


def error(graph: Graph, expected: torch.Tensor) -> float:
    return float((interpret(graph, HELD_OUT) - expected).square().mean())


@pytest.mark.parametrize("family", ["opt", "mixtral", *soak("llama", "gemma2", "gpt2")])
def test_without_rounding_nothing_changes(traced: Callable[[str], Graph], family: str) -> None:
    graph = traced(family)
    before = interpret(graph, HELD_OUT)
    (report,) = run_passes(graph, [QuantizeAwq(rounds=False, sequences=TEXT, head=None)], PassContext())
    assert report.counts["folded"] > 0
    assert (interpret(graph, HELD_OUT) - before).abs().max() <= 1e-4 * before.abs().max()


def test_better_than_rounding_on_uneven_channels(new_builder) -> None:
    expected = interpret(uneven(new_builder()), HELD_OUT)
    errors = {}
    for item in (QuantizeRtn(head=None), QuantizeAwq(head=None, sequences=TEXT)):
        graph, ctx = uneven(new_builder()), PassContext()
        run_passes(graph, [item], ctx)
        errors[item.name] = error(graph, expected)
    assert errors["quantize-awq"] < 0.75 * errors["quantize-rtn"]
    assert [r.name for r in ctx.quant_records] == ["gate", "up", "down"]
    assert all(r.output_snr_db > 15 and r.weight_snr_db > 10 for r in ctx.quant_records)
    assert ctx.quant_records[0].scaled


def test_records_refusals_and_progress(traced: Callable[[str], Graph]) -> None:
    graph, seen = traced("gpt2"), []
    ctx = PassContext(progress=lambda text, done, total: seen.append((text, done, total)))
    run_passes(graph, [QuantizeAwq(sequences=TEXT)], ctx)
    assert [r.method for r in ctx.quant_records] == ["awq"] * 8 + ["rtn"]
    assert [r.node for r in ctx.refusals if r.rule == "awq-scale"] == [
        f"transformer.h.{i}.mlp.c_proj.weight" for i in (0, 1)
    ]
    assert seen[-1][0].endswith("c_proj.weight") and 0 < seen[-1][1] < seen[-1][2]  # progress ends with the last weight


def test_kept_layers_stay_exact(new_builder) -> None:
    """A kept layer takes the scale of its group in its float weights."""
    graph, ctx = uneven(new_builder()), PassContext()
    expected = interpret(graph, HELD_OUT)
    run_passes(graph, [QuantizeAwq(rounds=False, keep=("up",), head=None, sequences=TEXT)], ctx)
    assert not isinstance(graph.weights["up"], QuantizedWeight)
    assert (interpret(graph, HELD_OUT) - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_same_inputs_give_the_same_codes_and_a_second_run_does_nothing(new_builder) -> None:
    graphs = [uneven(new_builder()) for _ in range(2)]
    for graph in graphs:
        run_passes(graph, [QuantizeAwq(sequences=TEXT)], PassContext())
    for name, weight in graphs[0].weights.items():
        other = graphs[1].weights[name]
        if isinstance(weight, QuantizedWeight):
            assert torch.equal(weight.parts()["codes"], other.parts()["codes"])
    (report,) = run_passes(graphs[0], [QuantizeAwq(sequences=TEXT)], PassContext())
    assert not report.modified


def test_bf16_checkpoints_keep_true_types(new_builder) -> None:
    """Folding makes float32 of bf16 norms; the manager's verifier would object to stale types."""
    b = new_builder()
    b.dtype = torch.bfloat16
    run_passes(uneven(b), [QuantizeAwq(sequences=TEXT)], PassContext())

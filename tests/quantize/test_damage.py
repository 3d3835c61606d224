"""`--quant auto` predicts the damage of a format from one backward pass; forward passes confirm it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from icc.compiler.calibration import load_calibration
from icc.compiler.frontend.load import load_graph
from icc.compiler.graph.graph import Graph
from icc.compiler.graph.interpret import as_compute, input_values
from icc.compiler.weights.formats.affine import GroupAffine
from icc.compiler.weights.formats.mixed import mixed
from icc.compiler.weights.handles import RoundedWeight
from icc.passes import pipelines
from icc.passes.base import PassContext
from icc.passes.manager import run_passes
from icc.passes.quantize import backward, damage
from icc.passes.quantize.auto import QuantizeAuto
from icc.passes.quantize.damage import divergences, measure
from icc.passes.quantize.forward import fast
from icc.passes.quantize.select import EMBEDDING, EXPERT, LINEAR, WeightJob
from torch import Tensor, fx

SAMPLE = Path(__file__).parents[2] / "samples" / "pystd"
TEXT = [torch.randint(0, 48, (9,), generator=torch.Generator().manual_seed(i)).tolist() for i in range(3)]


def layers(b: Any) -> Graph:
    """A graph with a residual stream, a value that two weights read, and a weight that two layers share."""
    x = b.op("rms_norm", b.embed(64), b.weight("norm", 64, scale=1.0), 1e-6)
    shared = b.weight("down", 64, 96)
    for i in range(3):
        gate = b.aten("silu", b.linear(x, f"gate{i}", 96, 64))
        h = b.aten("mul.Tensor", gate, b.linear(x, f"up{i}", 96, 64))
        x = b.aten("add.Tensor", x, b.op("linear", h, shared if i else b.weight("first", 64, 96), None))
    return b.finish(b.linear(b.aten("tanh", x), "head", 48, 64))


def read_weights(graph: Graph) -> dict[fx.Node, Tensor]:
    return {n: as_compute(graph.weight(n).load()).clone().requires_grad_() for n in graph.nodes if n.op == "get_attr"}


def whole(graph: Graph, ids: list[int], weights: dict[fx.Node, Tensor]) -> Tensor:
    """The logits [T, vocab], with gradients for all weights."""
    given, env = input_values(graph, ids), {}
    for node in graph.nodes:
        if node.op == "placeholder":
            env[node] = given[str(node.target)]
        elif node.op == "call_function":
            args = fx.map_arg(node.args, lambda n: weights[n] if n in weights else env[n])
            env[node] = fast(node.target)(*args, **node.kwargs)
    return env[graph.output]


@pytest.mark.parametrize("kind", ["built", "llama", "mixtral", "gemma2"])
def test_gradients_are_those_of_the_whole_model(
    kind: str, new_builder: Callable[..., Any], traced: Callable[[str], Graph], monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = layers(new_builder()) if kind == "built" else traced(kind)
    pull = torch.randn(9, graph.info.vocab_size, generator=torch.Generator().manual_seed(5))
    monkeypatch.setattr(backward, "_drawn", lambda outputs, *_: pull.clone())
    wanted = [n for n in graph.nodes if n.target in (LINEAR, EXPERT, EMBEDDING) and n.args[1].op == "get_attr"]
    found: dict[fx.Node, Tensor] = {}
    left: list[fx.Node] = []

    def visit(node: fx.Node, values: backward.Values, gradient: Tensor) -> None:
        weight = as_compute(graph.weight(node.args[1]).load()).clone().requires_grad_()
        with torch.enable_grad():
            args = [weight if arg is node.args[1] else values.get(arg, None) for arg in node.args]
            args = [a.detach() if isinstance(a, Tensor) and a is not weight else a for a in args]
            (own,) = torch.autograd.grad(fast(node.target)(*args), weight, gradient)
        found[node.args[1]] = found.get(node.args[1], 0) + own

    backward.backward(graph, TEXT, wanted, visit, left.append)
    weights = read_weights(graph)
    for ids in TEXT:
        whole(graph, ids, weights).backward(pull)
    assert sorted(left, key=str) == sorted(wanted, key=str)
    for node in wanted:
        name = node.args[1]
        torch.testing.assert_close(found[name], weights[name].grad, rtol=1e-3, atol=1e-5)


def test_segments_are_short(new_builder: Callable[..., Any]) -> None:
    """Segments are short, so that only one layer's values and gradients are in memory."""
    graph = layers(new_builder())
    calls = [n for n in graph.nodes if n.op == "call_function"]
    wanted = {n for n in calls if n.target is LINEAR}
    segments = backward._segments(graph, calls, wanted)
    assert [call for segment in segments for call in segment.calls] == calls
    assert len(segments) == 4 and all(len(segment.given) == 1 for segment in segments)


def test_expected_is_measured(builder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """For one layer before nearly equal logits, so that gradients do not depend on inputs; damage is in nats."""
    x = builder.op("rms_norm", builder.embed(64), builder.weight("norm", 64, scale=0.2), 1e-6)
    graph = builder.finish(builder.linear(x, "head", 48, 64))
    text = [torch.randint(0, 48, (60,), generator=torch.Generator().manual_seed(i)).tolist() for i in range(40)]
    monkeypatch.setattr(damage, "TOKENS", 2400)
    monkeypatch.setattr(damage, "importance_of", lambda hessian: hessian.gram.diagonal())  # nearest, not GPTQ
    node, form = graph.output, mixed("s", 4, 32, 64)
    job = WeightJob("head", (node,), GroupAffine(32, 8))
    expected = measure(graph, [job], [[(form, 1)]], text, lambda *_: None).curves[0].options[0].damage
    rounded = RoundedWeight(graph.weight(node.args[1]), form)
    (measured,) = divergences(graph, text, [{node: rounded}], lambda *_: None)
    assert 0.8 < expected / measured < 1.25


def test_ranks_of_the_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights and formats of a trained model, ranked by the loss from rounding one weight alone: rank correlation >
    0.95."""
    monkeypatch.setattr(damage, "TOKENS", 1024)
    graph = load_graph(SAMPLE, 512)
    run_passes(graph, pipelines.canonicalize(), PassContext())
    text = load_calibration(None, SAMPLE / "tokenizer.json", graph.info.vocab_size, num_sequences=4).sequences
    choice = QuantizeAuto()
    jobs = [job for job in choice.all_jobs(graph, PassContext()) if job.node.target is LINEAR and not job.tables][::5]
    options = [[(f, n) for f, n in choice.options(graph, job, False) if f] for job in jobs]
    curves = measure(graph, jobs, options, text, lambda *_: None).curves
    expected = [option.damage for curve in curves for option in curve.options]
    changes = [
        dict.fromkeys(job.nodes, RoundedWeight(graph.weight(job.node.args[1]), form))
        for job, own in zip(jobs, options, strict=True)
        for form, _ in own
    ]
    measured = divergences(graph, [ids[:64] for ids in text[:2]], changes, lambda *_: None)
    ranks = torch.tensor([expected, measured]).argsort(-1).argsort(-1).double()
    assert torch.corrcoef(ranks)[0, 1] > 0.95

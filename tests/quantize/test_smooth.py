"""int8 weights and activations: migration helps if channels are uneven, is folded exactly, and engines compute it."""

from __future__ import annotations

import pytest
import torch
from icc.compiler.graph.graph import Graph
from icc.compiler.graph.interpret import interpret
from icc.compiler.ops import OPS
from icc.compiler.weights.formats.affine import GroupAffine
from icc.compiler.weights.formats.base import Misfit
from icc.compiler.weights.formats.channel import ChannelInt8
from icc.compiler.weights.formats.registry import find_format
from icc.passes.base import PassContext
from icc.passes.manager import run_passes
from icc.passes.quantize.gptq_solver import Hessian, solve
from icc.passes.quantize.smooth import QuantizeSmooth

TEXT = [torch.randint(0, 48, (24,), generator=torch.Generator().manual_seed(i)).tolist() for i in range(6)]
HELD_OUT = torch.randint(0, 48, (40,), generator=torch.Generator().manual_seed(99)).tolist()


def uneven(b) -> Graph:
    """A gated MLP whose inputs have a few channels that are far larger than the others."""
    scale = torch.ones(64)
    scale[[3, 17, 40]] = 60.0
    x = b.op("rms_norm", b.embed(64), b.constant("norm", scale), 1e-6)
    gate = b.aten("silu", b.linear(x, "gate", 96, 64))
    h = b.linear(b.aten("mul.Tensor", gate, b.linear(x, "up", 96, 64)), "down", 64, 96)
    return b.finish(b.linear(b.aten("tanh", h), "head", 48, 64))


def rounded_inputs(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """Logits [T, vocab] with the inputs of all int8 layers rounded as kernels do."""
    linear = OPS["linear"].overload
    found = {}
    interpret(graph, HELD_OUT, observer=lambda node, args: found.setdefault(node, args))
    env: dict = {}
    for node in graph.nodes:
        if node.op == "get_attr":
            env[node] = graph.weight(node).load().float()
        elif node.op == "placeholder":
            env[node] = torch.tensor(HELD_OUT) if node.target == "token_ids" else torch.arange(len(HELD_OUT))
        elif node.op == "call_function":
            args = [env.get(a, a) if hasattr(a, "op") else a for a in node.args]
            if node.target is linear and (form := graph.weight(node.args[1]).storage).name.startswith("i"):
                args[0] = form.coded_rows(args[0])
            env[node] = node.target(*args, **node.kwargs)
    return env[graph.output]


def test_migration_beats_plain_rounding(new_builder, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = interpret(uneven(new_builder()), HELD_OUT)
    errors = []
    for searches in (False, True):
        graph, ctx = uneven(new_builder()), PassContext()
        run_passes(graph, [QuantizeSmooth(sequences=TEXT, head=None, searches=searches)], ctx)
        assert graph.weights["up"].describe() == "i8g64[96, 64]"
        errors.append(float((rounded_inputs(graph, monkeypatch) - expected).square().mean()))
    assert errors[1] < 0.5 * errors[0]
    assert ctx.quant_records[0].scaled and all(r.output_snr_db > 25 for r in ctx.quant_records)


def test_seven_bits_by_groups_lose_twice_as_much_at_most(new_builder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Encoders on CPUs: weights and activations have one bit less, in groups, and activations a zero point. Errors are
    squared."""
    expected, errors = interpret(uneven(new_builder()), HELD_OUT), {}
    for form in ("i8", "i7"):
        graph = uneven(new_builder())
        run_passes(graph, [QuantizeSmooth(format=form, sequences=TEXT, head=None)], PassContext())
        errors[form] = float((rounded_inputs(graph, monkeypatch) - expected).square().mean())
    assert graph.weights["up"].describe() == "i7g64[96, 64]" and errors["i7"] < 4.1 * errors["i8"]
    values = torch.randn(20, 48, generator=torch.Generator().manual_seed(2)) * torch.logspace(-3, 2, 20)[:, None]
    parts = find_format("i7").fitted(48).encode(values).parts
    assert parts["codes"].min() >= 65 and parts["codes"].max() <= 191 and (parts["zeros"] == 128).all()


def test_without_rounding_nothing_changes(traced) -> None:
    graph = traced("llama")
    before = interpret(graph, HELD_OUT)
    (report,) = run_passes(graph, [QuantizeSmooth(rounds=False, sequences=TEXT, head=None)], PassContext())
    assert report.counts["folded"] > 0
    assert (interpret(graph, HELD_OUT) - before).abs().max() <= 1e-4 * before.abs().max()


def test_the_format() -> None:
    form = find_format("i8").fitted(48)
    assert form == ChannelInt8(48, 8) and find_format(form.name) == form and form != GroupAffine(48, 8)
    with pytest.raises(Misfit, match="K = 40 is not a multiple of 16"):
        form.fitted(40)
    values = torch.randn(20, 48, generator=torch.Generator().manual_seed(2)) * torch.logspace(-3, 2, 20)[:, None]
    parts = form.encode(values).parts
    assert parts["codes"].min() >= 1 and (parts["zeros"] == 128).all() and parts["scales"].shape == (20, 1)
    half_a_step = values.abs().amax(1, keepdim=True) / 253
    assert ((form.decode(parts) - values).abs() <= half_a_step).all()
    solved = solve(values, Hessian.identity(48), form)
    assert ((form.decode(solved.parts) - values).abs() <= half_a_step).all()

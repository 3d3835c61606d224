"""Rotations change no logits, whatever the family; where they cannot be folded, the reason is told."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from icc.compiler.errors import UsageError
from icc.compiler.graph.graph import Graph
from icc.compiler.graph.interpret import interpret
from icc.passes.base import PassContext
from icc.passes.manager import run_passes
from icc.passes.quantize.hadamard import Rotation
from icc.passes.quantize.rotate import Rotate
from icc.passes.quantize.rtn import QuantizeRtn
from sizes import soak

IDS = torch.randint(0, 48, (24,), generator=torch.Generator().manual_seed(5)).tolist()


@pytest.mark.parametrize("size", [1, 9, 16, 24, 576])
def test_rotations_are_orthogonal(size: int) -> None:
    q = Rotation(size)(torch.eye(size))
    assert torch.allclose(q @ q.T, torch.eye(size), atol=1e-5)
    if size > 9:
        assert q.abs().max() < 0.9  # everything goes everywhere
    weight = torch.randn(3, size, 4)
    assert torch.allclose(Rotation(size).rows(weight), q.T @ weight, atol=1e-5)
    blocks = torch.randn(2, 2 * size)
    assert torch.allclose(Rotation(size)(blocks), (blocks.view(2, 2, size) @ q).view(2, -1), atol=1e-5)


@pytest.mark.parametrize(
    ("family", "stream", "heads"),
    [
        ("llama", True, 2),
        ("mixtral", True, 2),
        ("gemma2", False, 2),
        ("gpt2", False, 0),
        *soak(("opt", False, 2)),
    ],
)
def test_logits_stay(traced: Callable[[str], Graph], family: str, stream: bool, heads: int) -> None:
    graph, ctx = traced(family), PassContext()
    before = interpret(graph, IDS)
    (report,) = run_passes(graph, [Rotate()], ctx)
    assert (bool(report.counts.get("rotated")), report.counts.get("rotated-heads", 0)) == (stream, heads)
    reasons = {refusal.reason for refusal in ctx.refusals if refusal.rule == "rotate"}
    assert stream or family != "gemma2" or any(reason.endswith("icc.rms_norm with a gain") for reason in reasons)
    assert (interpret(graph, IDS) - before).abs().max() <= 1e-4 * before.abs().max()


def outlier(b) -> Graph:
    """A residual stream with channels that are far larger than the others in the weights that read it."""
    x = b.embed(64)
    for i in range(2):
        h = b.op("rms_norm", x, b.weight(f"norm{i}", 64, scale=1.0), 1e-6)
        h = b.aten("silu", b.linear(h, f"up{i}", 96, 64))
        x = b.aten("add.Tensor", x, b.linear(h, f"down{i}", 64, 96))
    return b.finish(b.linear(b.op("rms_norm", x, b.weight("norm", 64, scale=1.0), 1e-6), "head", 48, 64))


def test_better_than_rounding_where_channels_are_large(new_builder) -> None:
    errors = []
    for passes in ([], [Rotate(table="q8")]):
        graph, ctx = outlier(new_builder()), PassContext()
        for name in ("up0", "up1"):
            value = graph.weights[name].load().clone()
            value[:, [3, 40]] *= 20
            graph.weights[name] = type(graph.weights[name])(value)
        expected = interpret(graph, IDS)
        run_passes(graph, [*passes, QuantizeRtn(head=None)], ctx)
        errors.append(float((interpret(graph, IDS) - expected).square().mean()))
    assert errors[1] < 0.6 * errors[0]


def test_nothing_to_rotate_is_a_mistake(new_builder) -> None:
    b = new_builder()
    graph = b.finish(b.linear(b.aten("tanh", b.embed(64)), "head", 48, 64))
    with pytest.raises(UsageError, match="nothing of this model can be rotated"):
        run_passes(graph, [Rotate(required=True)], PassContext())

"""Rotations change no logits, for any family; if they cannot be folded, the reason is given, and inputs of layers are
rotated at run time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from icc.compiler.errors import UsageError
from icc.compiler.graph.graph import Graph
from icc.compiler.graph.interpret import interpret
from icc.compiler.ops import OPS
from icc.passes.base import PassContext
from icc.passes.manager import run_passes
from icc.passes.quantize.hadamard import Rotation
from icc.passes.quantize.rotate import Rotate
from icc.passes.quantize.rtn import QuantizeRtn
from sizes import soak

HADAMARD = OPS["hadamard"].overload
IDS = torch.randint(0, 48, (24,), generator=torch.Generator().manual_seed(5)).tolist()


@pytest.mark.parametrize("size", [1, 9, 16, 24, 576])
def test_rotations_are_orthogonal(size: int) -> None:
    q = Rotation(size)(torch.eye(size))
    assert torch.allclose(q @ q.T, torch.eye(size), atol=1e-5)
    if size > 9:
        assert q.abs().max() < 0.9  # every input reaches every output
    weight = torch.randn(3, size, 4)
    assert torch.allclose(Rotation(size).rows(weight), q.T @ weight, atol=1e-5)
    blocks = torch.randn(2, 2 * size)
    assert torch.allclose(Rotation(size)(blocks), (blocks.view(2, 2, size) @ q).view(2, -1), atol=1e-5)


@pytest.mark.parametrize(
    ("family", "stream", "heads", "online"),
    [
        ("llama", True, 2, 2),  # inputs of down projections
        ("mixtral", True, 2, 2),  # of all experts at once
        ("gemma2", False, 2, 6),  # q, k, v together; gate and up; down
        ("gpt2", False, 0, 8),  # inputs of all layers
        *soak(("opt", False, 2, 6)),
    ],
)
def test_logits_stay(traced: Callable[[str], Graph], family: str, stream: bool, heads: int, online: int) -> None:
    graph, ctx = traced(family), PassContext()
    before = interpret(graph, IDS)
    (report,) = run_passes(graph, [Rotate()], ctx)
    assert (bool(report.counts.get("rotated")), report.counts.get("rotated-heads", 0)) == (stream, heads)
    assert report.counts["rotated-online"] == online == sum(node.target is HADAMARD for node in graph.nodes)
    reasons = {refusal.reason for refusal in ctx.refusals if refusal.rule == "rotate"}
    assert stream or family != "gemma2" or any(reason.endswith("icc.rms_norm with a gain") for reason in reasons)
    assert (interpret(graph, IDS) - before).abs().max() <= 1e-4 * before.abs().max()


def test_a_head_that_is_the_embedding_of_an_odd_width(new_builder) -> None:
    """No group size fits the embedding, which is untied by the rotation: it is not quantized."""
    b, ctx = new_builder(), PassContext()
    table = b.weight("embed", 48, 60, scale=1.0)
    x = b.op("rms_norm", b.op("embedding", b.tokens, table), b.weight("norm", 60, scale=1.0), 1e-6)
    graph = b.finish(b.op("linear", x, table, None))
    expected = interpret(graph, IDS)
    run_passes(graph, [Rotate(table="q8", required=True)], ctx)
    assert (interpret(graph, IDS) - expected).abs().max() <= 1e-4 * expected.abs().max()


def outlier(b) -> Graph:
    """A graph of linear layers that read a residual stream and products of two values."""
    x = b.embed(64)
    for i in range(2):
        h = b.op("rms_norm", x, b.weight(f"norm{i}", 64, scale=1.0), 1e-6)
        h = b.aten("mul.Tensor", b.aten("silu", b.linear(h, f"gate{i}", 96, 64)), b.linear(h, f"up{i}", 96, 64))
        x = b.aten("add.Tensor", x, b.linear(h, f"down{i}", 64, 96))
    return b.finish(b.linear(b.op("rms_norm", x, b.weight("norm", 64, scale=1.0), 1e-6), "head", 48, 64))


@pytest.mark.parametrize("large", ["up", "down"])
def test_better_than_rounding_where_channels_are_large(new_builder, large: str) -> None:
    """up reads the residual stream, whose rotation is folded; down reads a product, which must be rotated at run
    time."""
    errors = []
    for passes in ([], [Rotate(table="q8", online=large == "down")]):
        graph, ctx = outlier(new_builder()), PassContext()
        for name in (f"{large}0", f"{large}1"):
            value = graph.weights[name].load().clone()
            value[:, [3, 40]] *= 20
            graph.weights[name] = type(graph.weights[name])(value)
        expected = interpret(graph, IDS)
        run_passes(graph, [*passes, QuantizeRtn(head=None)], ctx)
        errors.append(float((interpret(graph, IDS) - expected).square().mean()))
    assert errors[1] < 0.6 * errors[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_16_bits(new_builder, dtype: torch.dtype) -> None:
    """An untied embedding is rotated in its own dtype; all computation is in float32."""
    b, ctx = new_builder(), PassContext()
    b.dtype = dtype
    graph = outlier(b)
    expected = interpret(graph, IDS)
    run_passes(graph, [Rotate(table="q8", required=True)], ctx)
    assert graph.weights["embed"].dtype is dtype
    assert (interpret(graph, IDS) - expected).abs().max() < 0.02 * expected.abs().max()


def test_what_stays_as_stored_is_not_rotated(new_builder) -> None:
    """Layers with an unsuitable number of inputs are not rotated either, with a refusal."""
    b, ctx = new_builder(), PassContext()
    x = b.aten("silu", b.linear(b.embed(64), "kept", 64, 64))
    x = b.aten("silu", b.linear(x, "turned", 72, 64))
    graph = b.finish(b.linear(b.aten("silu", b.linear(x, "odd", 64, 72)), "head", 48, 64))
    (report,) = run_passes(graph, [Rotate(keep=("kept",), format="e4m3")], ctx)
    assert report.counts == {"rotated-online": 1}
    [(node, reason)] = [(r.node, r.reason) for r in ctx.refusals if r.rule == "rotate"]
    assert (node, reason) == ("odd", "72 inputs: no multiple of 16")


def test_nothing_to_rotate_is_a_mistake(new_builder) -> None:
    b = new_builder()
    graph = b.finish(b.linear(b.aten("tanh", b.embed(64)), "head", 48, 64))  # 8 bits, without a rotation
    with pytest.raises(UsageError, match="nothing of this model can be rotated"):
        run_passes(graph, [Rotate(required=True)], PassContext())

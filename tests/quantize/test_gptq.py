"""GPTQ: lower output error than rounding, column order, experts, and the calibration stream."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from icc.compiler.graph.graph import Graph
from icc.compiler.graph.interpret import interpret
from icc.compiler.weights.formats.affine import GroupAffine
from icc.compiler.weights.handles import PackedWeight, QuantizedWeight
from icc.passes.base import PassContext
from icc.passes.manager import run_passes
from icc.passes.quantize.gptq import QuantizeGptq
from icc.passes.quantize.gptq_solver import Hessian, solve
from icc.passes.quantize.stream import stream

Q4, SMALL = GroupAffine(64, 4), GroupAffine(32, 4)
TEXT = [torch.randint(0, 48, (24,), generator=torch.Generator().manual_seed(i)).tolist() for i in range(6)]


def correlated(rows: int, width: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(3)
    mix = torch.randn(width, width, generator=random) * torch.logspace(0, -2, width)[:, None]
    return torch.randn(rows, width, generator=random) @ mix


@pytest.mark.parametrize("act_order", [False, True])
def test_better_than_rounding_on_correlated_inputs(act_order: bool) -> None:
    x, weight = correlated(500, 192), torch.randn(40, 192, generator=torch.Generator().manual_seed(1))
    solved = solve(weight, Hessian.of([x[:200], x[200:]], 0.01, act_order), Q4)
    ours = (x @ (Q4.decode(solved.parts) - weight).T).square().mean()
    nearest = (x @ (Q4.rounded(weight) - weight).T).square().mean()
    assert ours < 0.5 * nearest
    assert solved.noise == pytest.approx(float(ours) * 40, rel=1e-3)
    assert torch.equal(solved.parts["scales"], solved.parts["scales"].half().float())


@pytest.mark.parametrize("act_order", [False, True])
def test_errors_are_passed_on_as_optimal_brain_surgeon_does(act_order: bool) -> None:
    """Column by column, with the inverse Hessian of the remaining columns (Frantar et al. 2023, section 3.1), while the
    solver uses its Cholesky factor and blocks of columns."""
    x, weight = correlated(500, 192), torch.randn(40, 192, generator=torch.Generator().manual_seed(1))
    hessian = Hessian.of([x], 0.01, act_order)
    found = solve(weight, hessian, Q4).parts
    levels = Q4.levels(found)
    damped = hessian.gram.double() + 0.01 * hessian.gram.diagonal().double().mean() * torch.eye(192)
    inverse, left, codes = damped.inverse(), weight.double(), torch.empty_like(found["codes"])
    for j in hessian.order.tolist():
        here = [level[:, j // Q4.group] for level in levels]
        codes[:, j] = Q4.code(left[:, j].float(), *here)
        error = (left[:, j] - Q4.value(codes[:, j].float(), *here)) / inverse[j, j]
        left = left - error[:, None] * inverse[j]
        inverse = inverse - inverse[:, [j]] * inverse[[j]] / inverse[j, j]
    assert (codes == found["codes"]).float().mean() > 0.98  # except ties and their effects


def test_no_hessian_is_rounding_to_nearest() -> None:
    weight = torch.randn(16, 64)
    eye = SMALL.decode(solve(weight, Hessian.identity(64), SMALL).parts)
    assert (eye - weight).square().sum() <= (SMALL.rounded(weight) - weight).square().sum()


def test_dead_and_repeated_columns() -> None:
    x = correlated(200, 64)
    x[:, 5] = 0
    x[:, 9] = x[:, 8]
    for inputs in (x, x * 0):
        solved = solve(torch.randn(8, 64), Hessian.of([inputs], 0.01, True), SMALL)
        assert torch.isfinite(SMALL.decode(solved.parts)).all()


def model(b) -> Graph:
    x = b.op("rms_norm", b.embed(64), b.weight("norm", 64, scale=1.0), 1e-6)
    h = b.linear(b.aten("silu", b.linear(x, "up", 96, 64)), "down", 64, 96)
    return b.finish(b.linear(b.aten("tanh", h), "head", 48, 64))


def test_pass_packs_records_and_repeats(new_builder) -> None:
    graphs, contexts = [model(new_builder()) for _ in range(2)], [PassContext() for _ in range(2)]
    for graph, ctx in zip(graphs, contexts, strict=True):
        run_passes(graph, [QuantizeGptq(sequences=TEXT)], ctx)
    up = graphs[0].weights["up"]
    assert isinstance(up, PackedWeight) and up.describe() == "q4g64[96, 64]"
    assert [(r.name, r.method, r.format) for r in contexts[0].quant_records] == [
        ("up", "gptq", "q4g64"),
        ("down", "gptq", "q4g32"),
        ("head", "rtn", "q8g64"),
    ]
    assert all(r.output_snr_db > 15 for r in contexts[0].quant_records[:2])
    for name, weight in graphs[0].weights.items():
        if isinstance(weight, QuantizedWeight):
            assert torch.equal(weight.parts()["codes"], graphs[1].weights[name].parts()["codes"])
    (report,) = run_passes(graphs[0], [QuantizeGptq(sequences=TEXT)], PassContext())
    assert not report.modified


def test_head_in_4_bit_is_calibrated(new_builder) -> None:
    graph, ctx = model(new_builder()), PassContext()
    run_passes(graph, [QuantizeGptq(sequences=TEXT, head="q4")], ctx)
    assert ctx.quant_records[-1].name == "head" and ctx.quant_records[-1].method == "gptq"


def test_experts(traced: Callable[[str], Graph]) -> None:
    graph, ctx = traced("mixtral"), PassContext()
    run_passes(graph, [QuantizeGptq(sequences=[[5, 6, 7, 8, 9, 10]])], ctx)
    assert graph.weights["model.layers.0.mlp.experts.gate_up_proj"].describe() == "q4g64[4, 192, 64]"
    few = [r for r in ctx.refusals if r.rule == "gptq"]
    assert few and all(r.reason.endswith("calibration tokens, rounded to nearest") for r in few)


def test_stream_sees_what_the_interpreter_sees(traced: Callable[[str], Graph]) -> None:
    graph = traced("llama")
    wanted = [n for n in graph.nodes if "linear" in str(n.target)]
    expected: dict = {}
    for ids in TEXT[:2]:
        interpret(graph, ids, observer=lambda node, args: expected.setdefault(node, []).append(args[0]))
    seen: dict = {}
    stream(graph, TEXT[:2], wanted, lambda node, inputs: seen.__setitem__(node, inputs[node.args[0]]))
    assert list(seen) == wanted
    for node in wanted:
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(seen[node], expected[node], strict=True))

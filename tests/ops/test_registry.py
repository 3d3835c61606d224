"""The registry: every op on every back end, and ops that another module declares."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from graph_tracing import OPS, Value, aten, difference, icc, trace
from icc.compiler.backends.cpu.backend import CPU_PROFILE
from icc.compiler.backends.cpu.emit import emit_source
from icc.compiler.backends.cpu.isa import host_isas
from icc.compiler.backends.triton.backend import TritonBackend
from icc.compiler.backends.triton.plan import plan_program
from icc.compiler.backends.triton.tiling.choice import Tuner
from icc.compiler.errors import VerifyError
from icc.compiler.graph.graph import Graph
from icc.compiler.graph.interpret import interpret
from icc.compiler.graph.verify import Stage, verify
from icc.compiler.ops import Cost, Traits, op, op_of, tensor_bytes, traits_of
from icc.compiler.program.lower import LowerOptions, lower
from icc.compiler.targets import TARGETS
from icc.passes.base import PassContext
from icc.passes.canonicalize.eliminate_common import EliminateCommon
from icc.runtime.format.manifest import Limits
from run_lowered import lower_graph, optimize, run_lowered
from sample_graph import SampleGraph, samples_of
from torch import Tensor

H100 = TARGETS["h100"]


def render_cpu(graph: Graph) -> str:
    lowered = lower(graph, LowerOptions("f32", CPU_PROFILE, block_size=16))
    return emit_source(lowered.program, host_isas()[0])


def render_triton(graph: Graph) -> str:
    backend = TritonBackend(H100, "bf16")
    lowered = lower(graph, LowerOptions(backend.kv_dtype, backend.profile, block_size=16))
    planned = plan_program(lowered.program, Limits(32, 4, 32), Tuner(H100), ())
    return "\n".join(spec.source for spec in planned.specs().values())


BACKENDS: dict[str, Callable[[Graph], str]] = {"cpu": render_cpu, "triton": render_triton}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", [declared.name for declared in OPS.lowered()])
def test_every_op_has_a_lowering_and_a_kernel(name: str, backend: str) -> None:
    """One graph per op, so that the first gap does not hide another."""
    if backend == "triton" and name == "transfer":
        pytest.skip("stages of GPUs are refused, see compiler/options.py")
    if name == "select_rows":  # needs the step's rows: every program has one
        graph = optimize(trace(lambda x: aten.exp.default(x), x="f32[T, 8]"))
    elif name in ("reduce_scatter", "all_gather_rows"):  # its rows belong to one rank until they are gathered
        scatter, gather = (OPS[each].overload for each in ("reduce_scatter", "all_gather_rows"))
        graph = optimize(trace(lambda x: gather(scatter(x, 1), 1), x="f32[T, 8]"))
    else:
        graph = optimize(SampleGraph(samples_of(OPS[name])).graph)
    assert any(op_of(node.target) is OPS[name] for node in graph.nodes), "no pass takes it out of the graph"
    assert BACKENDS[backend](graph)


def test_what_never_reaches_the_lowering() -> None:
    """Elementwise aten ops, which are fused before, and attention without its cache."""
    others = [declared for declared in OPS.values() if not declared.is_lowered]
    assert {declared.name.split(".")[0] for declared in others} - {"acme"} == {"aten", "prims", "attention"}
    assert all(d.traits.elementwise or d.traits.abstract for d in others)


def test_targets_find_their_ops() -> None:
    assert op_of(aten.mul.Tensor) is op_of(aten.mul.Scalar) is OPS["aten.mul"]
    assert op_of(icc.linear.default) is OPS["linear"] and op_of("token_ids") is None
    assert traits_of(aten.view.default).strided and not traits_of(aten.cat.default).strided
    assert op_of(aten.div.Tensor_mode) is None and op_of(aten.view.dtype) is None


# Like another package, or a test: icc knows nothing below.


@op(
    Traits(elementwise=True, homogeneous=(0,)),
    namespace="acme",
    instructions=lambda body, x, knee, slope: body(
        "where", body("gt", x, knee), body("mul", x, slope), body("mul", x, 1.0)
    ),
)
def kinked(x: Tensor, knee: float, slope: float) -> Tensor:
    """x below the knee, slope * x above."""
    return torch.where(x > knee, x * slope, x * 1.0)


@kinked.set_cost
def _kinked_cost(x: Tensor, *rest: object) -> Cost:
    return Cost(3.0 * x.numel(), 2 * tensor_bytes(x))


@kinked.set_samples
def _kinked_samples() -> Iterator[tuple[Tensor, float, float]]:
    yield torch.randn(3, 7), 0.25, 3.0
    yield torch.randn(2, 5, 4), -1.0, 0.5


@op(Traits(stateful=True, mixes_tokens=True), namespace="acme")
def decayed(x: Tensor, layer: int) -> Tensor:
    """A running sum over tokens, halved at each token: a layer with a state."""
    rows = [x[0]]
    for row in x[1:]:
        rows.append(rows[-1] * 0.5 + row)
    return torch.stack(rows)


def test_an_op_of_another_module_on_the_cpu(tmp_path: Path) -> None:
    made = SampleGraph(samples_of(kinked))
    verify(made.graph, Stage.EXPORTED, "the test")
    logits = torch.from_numpy(run_lowered(lower_graph(optimize(made.graph)), tmp_path, list(range(21))))
    for slots in made.slots.values():
        [slot] = slots
        rows, size = slot.expected.shape
        assert difference(slot.expected, logits[:rows, slot.start : slot.start + size]) <= kinked.tolerance


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_op_of_another_module_is_fused_on_every_back_end(backend: str) -> None:
    graph = optimize(trace(lambda x: kinked.overload(x * 2.0, 0.5, 3.0), x="f32[T, 8]"))
    assert sum(op_of(n.target) is OPS["pointwise"] for n in graph.nodes) == 1
    assert BACKENDS[backend](graph)


def test_passes_ask_its_traits() -> None:
    """Two calls of a layer with a state are two states, whatever the layer's name."""

    def fn(x: Value) -> Value:
        return decayed.overload(x, 0) + decayed.overload(x, 0) + aten.exp.default(x) + aten.exp.default(x)

    graph = trace(fn, x="f32[T, 8]")
    before = interpret(graph, [1, 2, 3])
    assert EliminateCommon().run(graph, PassContext()).counts == {"merged": 1}
    assert difference(before, interpret(graph, [1, 2, 3])) == 0
    with pytest.raises(ValueError, match=r"named 'acme.kinked' is declared already"):
        op(namespace="acme")(kinked.reference)


def test_an_op_that_nobody_declared_is_refused() -> None:
    graph = trace(lambda x: aten.erfinv.default(x), x="f32[T, 8]")
    with pytest.raises(VerifyError, match="is not an op of this stage"):
        verify(graph, Stage.EXPORTED, "the test")

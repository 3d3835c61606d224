"""An op that icc does not know, with its step, its lowering and a kernel per back end, all defined here, works on every
back end without a change of icc."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
import torch
from graph_tracing import IDS, Value, difference, trace
from icc.compiler.backends.cpu.kernels.base import KernelParams
from icc.compiler.backends.cpu.kernels.table import CPU_KERNELS
from icc.compiler.backends.triton.backend import TritonBackend
from icc.compiler.backends.triton.kernels.table import TRITON_KERNELS
from icc.compiler.backends.triton.spec import ONE, LaunchSpec, Shape, StepKernel
from icc.compiler.backends.triton.tiling.choice import Tuner
from icc.compiler.errors import VerifyError
from icc.compiler.graph.graph import Graph
from icc.compiler.graph.interpret import interpret
from icc.compiler.measure.interpreted import interpreted_steps
from icc.compiler.op_check import check_triton_op
from icc.compiler.ops import OPS, Traits, op
from icc.compiler.program.context import Lowerer, row_kind
from icc.compiler.program.lower import LowerOptions, lower
from icc.compiler.program.lowerings import register_lowering
from icc.compiler.program.placed import Placed
from icc.compiler.program.program import decode_program
from icc.compiler.program.steps.base import Step, step_type
from icc.compiler.program.verify import verify_lowered
from icc.compiler.targets import TARGETS
from icc.runtime.format.manifest import Limits
from icc.runtime.format.operands import Operand
from icc.runtime.format.plan import extent
from run_lowered import lower_graph, optimize, run_lowered
from torch import Tensor, fx

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's warnings about NaN and infinities


@op(Traits(), namespace="outside")
def tilted(x: Tensor, slope: float) -> Tensor:
    """x plus slope times the column."""
    return x + slope * torch.arange(x.shape[-1], dtype=x.dtype, device=x.device)


@tilted.set_samples
def _samples() -> Iterator[tuple[Tensor, float]]:
    yield torch.randn(3, 19), 0.5


def draw_ramp(body: Any, x: Any, w: Any, low: float) -> Any:
    return body("mul", body("maximum", body("add", x, low), 0.0), w)


@op(Traits(elementwise=True), namespace="acme", instructions=draw_ramp)
def ramped(x: Tensor, w: Tensor, low: float) -> Tensor:
    """x + low, at least 0, times w."""
    return (x + low).clamp(min=0.0) * w


@step_type
class Tilted(Step, frozen=True, kw_only=True, tag="tilted"):
    """y [n] = x [n] + slope * column."""

    x: Operand
    y: Operand
    n: int
    slope: float

    def widths(self) -> dict[str, int]:
        return {"x": self.n, "y": self.n}


def lower_tilted(low: Lowerer, node: fx.Node) -> Placed:
    x, out = low.dense(low.placed(node.args[0])), low.new(node)
    slope: float = node.args[1]  # type: ignore[assignment]
    low.emit(Tilted(rows=row_kind(out), x=x.operand, y=out.operand, n=x.size, slope=slope), node)
    return out


class TiltedParams(KernelParams[Tilted]):
    """The kernel for CPUs."""

    def source(self) -> str:
        s = self.step
        return f"""static void {self.fn}(const Ctx& c) {{
    const Range rows = share(c, {self.row_count});
    for (int64_t i = rows.begin; i < rows.end; ++i)
        for (int64_t j = 0; j < {s.n}; ++j)
            c.output<float>(0)[i * {s.y.stride} + j] = c.input<const float>(0)[i * {s.x.stride} + j] + {s.slope!r}f * j;
}}"""


@dataclass(frozen=True)
class TiltedKernel(StepKernel[Tilted]):
    """The kernel for GPUs."""

    entry: ClassVar[str] = "tilted"

    @classmethod
    def refusal(cls, step: Tilted) -> str:
        return "too wide" if step.n > 1024 else super().refusal(step)

    def launches(self, shape: Shape, limits: Limits, tuner: Tuner) -> tuple[LaunchSpec, ...]:
        s, width = self.step, 1 << (self.step.n - 1).bit_length()
        source = f"""import triton
import triton.language as tl


@triton.jit
def tilted(x_ptr, y_ptr):
    at = tl.arange(0, {width})
    x = tl.load(x_ptr + tl.program_id(0) * {s.x.stride} + at, mask=at < {s.n}, other=0.0).to(tl.float32)
    y = x + {s.slope} * at.to(tl.float32)
    tl.store(y_ptr + tl.program_id(0) * {s.y.stride} + at, y.to(y_ptr.dtype.element_ty), mask=at < {s.n})
"""
        return (LaunchSpec(source, "tilted", self.pointers(x="x_ptr", y="y_ptr"), (extent(self.num_rows), ONE, ONE)),)


register_lowering(tilted, lower_tilted)
CPU_KERNELS.register(Tilted, TiltedParams)
TRITON_KERNELS.register(Tilted, TiltedKernel)


def graph() -> Graph:
    """The op between others, and as the last one."""

    def fn(x: Value, w: Value) -> Value:
        return tilted.overload(tilted.overload(x * 2.0, 0.5) * w, -1.25)

    return optimize(trace(fn, x="f32[T, 19]", w="f32[19]"))


def test_on_the_cpu(tmp_path: Path) -> None:
    lowered = lower_graph(graph())
    assert [s.op for s in lowered.program.steps].count("tilted") == 2
    assert decode_program(msgspec.json.encode(lowered.program), "program.json") == lowered.program
    found = torch.from_numpy(run_lowered(lowered, tmp_path, IDS))
    assert difference(interpret(graph(), IDS), found) < 1e-5


def test_in_an_interpreted_plan() -> None:
    """Logits of a prompt, and of as many decoding sequences."""
    for logits in interpreted_steps(graph(), 9, TARGETS["h100"]).values():
        assert difference(interpret(graph(), range(9)), logits) < 1e-5


def test_its_kernel_is_checked_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    check_triton_op(tilted)
    check_triton_op(tilted, [(torch.full((2, 4), float("inf")), 1.0)], "mi300x")
    source = TiltedKernel.launches
    monkeypatch.setattr(TiltedKernel, "launches", lambda self, *a: [replaced(spec) for spec in source(self, *a)])
    with pytest.raises(ValueError, match=r"tilted, sample 0, a prompt of 3 tokens: 51 of 57 .* row 0, element 2 is"):
        check_triton_op(tilted)


def replaced(spec: LaunchSpec) -> LaunchSpec:
    """The launch with a wrong kernel, whose slope ends at column 1."""
    return replace(spec, source=spec.source.replace("* at", "* tl.minimum(at, 1)"))


def test_what_fusion_draws_is_checked_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operands: rows, a weight of one row's shape, a number; then instructions that differ from the reference."""
    x = torch.tensor([[0.5, -2.0, float("nan")], [3.0, -0.0, -float("inf")]])
    check_triton_op(ramped, [(x, torch.tensor([1.0, 2.0, 3.0]), 0.5), (x, x, 0.0)])
    monkeypatch.setattr(ramped, "instructions", lambda body, x, w, low: body("mul", body("add", x, low), w))
    with pytest.raises(ValueError, match=r"ramped, sample 0, .*: 2 of 6 numbers are off .* is -3, and 0 by the ref"):
        check_triton_op(ramped, [(x, torch.tensor([1.0, 2.0, 3.0]), 0.5)])


def test_what_is_not_checked_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="paged_attention: rows depend on each other"):
        check_triton_op(OPS["paged_attention"])
    with pytest.raises(ValueError, match=r"ramped: there is no sample to check"):
        check_triton_op(ramped)
    with pytest.raises(ValueError, match=r"select_rows, sample 0: results must be \[5, ..\], not \[\(2, 9\)\]"):
        check_triton_op(OPS["select_rows"])
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(RuntimeError, match="set TRITON_INTERPRET=1 in the environment"):
        check_triton_op(tilted)


def test_a_second_kernel_lowering_or_step_of_one_op_is_refused() -> None:
    with pytest.raises(ValueError, match="has a kernel of op 'tilted' already"):
        CPU_KERNELS.register(Tilted, KernelParams)
    with pytest.raises(ValueError, match=r"'outside.tilted' has a lowering already"):
        register_lowering(tilted, lambda low, node: None)
    with pytest.raises(ValueError, match="a step of op 'tilted' already"):
        step_type(type("Other", (Tilted,), {}, frozen=True, kw_only=True, tag="tilted"))  # type: ignore[call-overload]


def test_what_a_kernel_cannot_do_is_one_clear_error() -> None:
    wide = optimize(trace(lambda x: tilted.overload(x, 1.0), x="f32[T, 1500]"))
    backend = TritonBackend(TARGETS["h100"], "f32")
    lowered = lower(wide, LowerOptions(backend.kv_dtype, backend.profile, 16))
    with pytest.raises(VerifyError, match=r"kernel tilted_0 \(tilted\): too wide"):
        verify_lowered(lowered.program, backend.refusal)

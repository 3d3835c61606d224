"""Inputs that icc does not know, declared by a pass and read by an op that are both defined here: values per token from
requests reach the kernels of every back end without a change of icc."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import icc
import msgspec
import numpy as np
import pytest
import torch
from building import build
from fake_cuda import OnDisk
from icc import SamplingParams
from icc.compiler.backends.cpu.kernels.base import KernelParams
from icc.compiler.backends.cpu.kernels.table import CPU_KERNELS
from icc.compiler.backends.triton.kernels.table import TRITON_KERNELS
from icc.compiler.backends.triton.plan import plan_program
from icc.compiler.backends.triton.reach import plan_faults
from icc.compiler.backends.triton.spec import ONE, LaunchSpec, Shape, StepKernel
from icc.compiler.backends.triton.tiling.choice import Tuner
from icc.compiler.frontend.load import load_graph
from icc.compiler.graph.graph import Graph
from icc.compiler.graph.interpret import interpret
from icc.compiler.graph.parser import parse_graph
from icc.compiler.graph.printer import print_graph
from icc.compiler.ops import OPS, Traits, op
from icc.compiler.program.context import Lowerer, row_kind
from icc.compiler.program.lowerings import register_lowering
from icc.compiler.program.placed import Placed
from icc.compiler.program.steps.base import FLOATS, Step, step_type
from icc.compiler.targets import TARGETS
from icc.passes import pipelines
from icc.passes.base import Pass, PassContext, PassResult
from icc.passes.manager import run_passes
from icc.runtime.format.batch import BatchArray
from icc.runtime.format.load import open_engine
from icc.runtime.format.manifest import Limits
from icc.runtime.format.operands import Operand
from icc.runtime.format.plan import extent
from icc.runtime.llm import LLM
from icc.runtime.query import Query
from on_ptx import plain_ir
from torch import Tensor, fx

LIMITS = Limits(max_seq_len=40, max_batch_size=4, max_step_tokens=12)


@op(Traits(), namespace="outside")
def steered(x: Tensor, steer: Tensor, mark: Tensor, axes: Tensor) -> Tensor:
    """x plus steer times (mark + 1) times the sum of three axes."""
    return x + steer * ((mark + 1) * axes.sum(-1)).unsqueeze(-1)


@steered.set_samples
def _samples() -> Iterator[tuple[Tensor, ...]]:
    yield torch.randn(3, 8), torch.randn(3, 8), torch.tensor([-1, 0, 2]), torch.ones(3, 3, dtype=torch.int64)


@step_type
class Steered(Step, frozen=True, kw_only=True, tag="steered"):
    """y [n] = x [n] + steer [n] * (mark + 1) * sum of axes [3]."""

    DTYPES: ClassVar = {"mark": ("i32",), "axes": ("i8",), "steer": FLOATS}
    x: Operand
    steer: Operand
    mark: Operand
    axes: Operand
    y: Operand
    n: int

    def widths(self) -> dict[str, int]:
        return {"x": self.n, "steer": self.n, "mark": 1, "axes": 3, "y": self.n}


def lower_steered(low: Lowerer, node: fx.Node) -> Placed:
    x, (steer, mark, axes) = low.dense(low.placed(node.args[0])), map(low.placed, node.args[1:])
    out = low.new(node)
    read = {"x": x.operand, "steer": steer.operand, "mark": mark.operand, "axes": axes.operand}
    low.emit(Steered(rows=row_kind(out), **read, y=out.operand, n=x.size), node)
    return out


class SteeredParams(KernelParams[Steered]):
    """The kernel for CPUs."""

    def source(self) -> str:
        s, kind = self.step, {"bf16": "Bf16", "f16": "Half"}[self.step.steer.dtype]
        return f"""static void {self.fn}(const Ctx& c) {{
    const Range rows = share(c, {self.row_count});
    for (int64_t i = rows.begin; i < rows.end; ++i) {{
        const int8_t* axes = c.input<const int8_t>(3) + i * {s.axes.stride};
        const float scale = (c.input<const int32_t>(2)[i] + 1) * (axes[0] + axes[1] + axes[2]);
        for (int64_t j = 0; j < {s.n}; ++j)
            c.output<float>(0)[i * {s.y.stride} + j] = c.input<const float>(0)[i * {s.x.stride} + j]
                + scale * value(c.input<const {kind}>(1)[i * {s.steer.stride} + j]);
    }}
}}"""


@dataclass(frozen=True)
class SteeredKernel(StepKernel[Steered]):
    """The kernel for GPUs."""

    entry: ClassVar[str] = "steered"

    def launches(self, shape: Shape, limits: Limits, tuner: Tuner) -> tuple[LaunchSpec, ...]:
        s, width = self.step, 1 << (self.step.n - 1).bit_length()
        source = f"""import triton
import triton.language as tl


@triton.jit
def steered(x_ptr, steer_ptr, mark_ptr, axes_ptr, y_ptr):
    row = tl.program_id(0)
    at = tl.arange(0, {width})
    x = tl.load(x_ptr + row * {s.x.stride} + at, mask=at < {s.n}, other=0.0).to(tl.float32)
    steer = tl.load(steer_ptr + row * {s.steer.stride} + at, mask=at < {s.n}, other=0.0).to(tl.float32)
    axes = axes_ptr + row * {s.axes.stride}
    total = tl.load(axes).to(tl.int32) + tl.load(axes + 1).to(tl.int32) + tl.load(axes + 2).to(tl.int32)
    y = x + steer * ((tl.load(mark_ptr + row) + 1) * total).to(tl.float32)
    tl.store(y_ptr + row * {s.y.stride} + at, y.to(y_ptr.dtype.element_ty), mask=at < {s.n})
"""
        args = self.pointers(x="x_ptr", steer="steer_ptr", mark="mark_ptr", axes="axes_ptr", y="y_ptr")
        return (LaunchSpec(source, "steered", args, (extent(self.num_rows), ONE, ONE)),)


register_lowering(steered, lower_steered)
CPU_KERNELS.register(Steered, SteeredParams)
TRITON_KERNELS.register(Steered, SteeredKernel)


@dataclass(frozen=True)
class Steer(Pass):
    """Inserts the op after the embedding of the tokens. dtype: that of the given rows to add."""

    name: ClassVar[str] = "outside-steer"
    dtype: str = "bf16"

    def run(self, graph: Graph, ctx: PassContext) -> PassResult:
        [table] = [n for n in graph.nodes if n.target is OPS["embedding"].overload and _by_token(graph, n)]
        width = table.meta["type"].shape[-1]
        inputs = [
            graph.declare(BatchArray("steer", ("T", width), self.dtype)),
            graph.declare(BatchArray("mark", ("T",), fill=-1)),
            graph.declare(BatchArray("axes", ("T", 3), "i8")),
        ]
        view = torch.ops.aten.view.default
        with graph.fx.inserting_before(table.next):
            rows = graph.call(view, table, [-1, width])
            added = graph.call(steered.overload, rows, *inputs)
            back = graph.call(view, added, [-1, *table.meta["type"].shape])
        table.replace_all_uses_with(back, delete_user_cb=lambda user: user is not rows)
        return PassResult(True, Counter(inserted=1))


def _by_token(graph: Graph, node: fx.Node) -> bool:
    source: Any = node.args[0]
    while source.op == "call_function":
        source = source.args[0]
    return source is graph.input("token_ids")


@pytest.fixture
def model(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A one-layer checkpoint; compiles use the pass."""
    config = tiny.tiny_configs()["llama"]
    config.num_hidden_layers = 1
    tiny.save_tiny(config, tmp_path / "model")
    before = pipelines.canonicalize
    monkeypatch.setattr(pipelines, "canonicalize", lambda: [Steer(), *before()])
    return tmp_path / "model"


def optimized(model: Path) -> Graph:
    graph = load_graph(model, LIMITS.max_seq_len)
    for phase in (pipelines.canonicalize(), pipelines.attention(), pipelines.fuse()):
        run_passes(graph, phase, PassContext())
    return graph


def extras_of(seed: int, tokens: int, width: int) -> tuple[dict[str, Tensor], dict[str, bytes]]:
    """Random rows of all inputs for `tokens` tokens, for the reference and for the engine."""
    rng = torch.Generator().manual_seed(seed)
    steer = torch.randn(tokens, width, generator=rng).to(torch.bfloat16)
    mark = torch.randint(-1, 3, (tokens,), generator=rng, dtype=torch.int32)
    axes = torch.randint(-2, 3, (tokens, 3), generator=rng, dtype=torch.int8)
    packed = {"steer": steer.view(torch.int16).numpy(), "mark": mark.numpy(), "axes": axes.numpy()}
    return {"steer": steer, "mark": mark, "axes": axes}, {name: rows.tobytes() for name, rows in packed.items()}


def compare(llm: LLM, graph: Graph, bound: float) -> None:
    """Check concurrent sequences whose prompts take several steps: with rows for all tokens, with fewer rows, and with
    none."""
    lengths, rng = {0: 25, 1: 17, 2: 3}, np.random.default_rng(0)
    width = next(array for array in graph.declared if array.name == "steer").row_shape[0]
    prompts = {number: rng.integers(3, 119, length).tolist() for number, length in lengths.items()}
    rows = {0: extras_of(0, 40, width), 1: extras_of(1, 9, width), 2: ({}, {})}
    params = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True, logprobs=1)
    generations = [llm.submit(Query(prompts[n], params, extras=rows[n][1])).generations[0] for n in lengths]
    while llm.loop.has_work():
        llm.loop.step()
    changed = 0.0
    for number, generation in enumerate(generations):
        ids = [*prompts[number], *generation.token_ids[:-1]]
        given = {name: padded(graph, name, value, len(ids)) for name, value in rows[number][0].items()}
        wanted = interpret(graph, ids, range(len(prompts[number]) - 1, len(ids)), extras=given)
        changed += float((wanted - interpret(graph, ids, range(len(prompts[number]) - 1, len(ids)))).abs().max())
        logprobs = wanted.log_softmax(-1)
        for place, found in enumerate(generation.completion().logprobs):
            assert found.logprob == pytest.approx(float(logprobs[place, found.token_id]), abs=bound)
            assert found.logprob == pytest.approx(float(logprobs[place].max()), abs=bound)
    assert changed > 1, "the rows change what the model says"


def padded(graph: Graph, name: str, rows: Tensor, count: int) -> Tensor:
    """Rows for `count` tokens; missing ones have the fill value."""
    fill = next(array for array in graph.declared if array.name == name).fill
    return torch.cat([rows[:count], torch.full((max(count - len(rows), 0), *rows.shape[1:]), fill, dtype=rows.dtype)])


def test_on_the_cpu(model: Path, tmp_path: Path) -> None:
    limits = {"max_seq_len": 40, "max_batch_size": 4, "max_step_tokens": 12}
    engine = icc.compile(model, tmp_path / "x.engine", target="native", quant="none", **limits)
    opened = open_engine(engine)
    assert [array.name for array in opened.program.inputs] == ["steer", "mark", "axes"]
    opened.close()
    with icc.load(engine, threads=2) as llm:
        compare(llm, optimized(model), 2e-4)
        ids, (given, packed) = list(range(5, 18)), extras_of(3, 13, 64)
        found = llm.logits(ids, packed)
        wanted = interpret(optimized(model), ids, extras=given)
        np.testing.assert_allclose(found, wanted, atol=1e-4 * float(wanted.abs().max()))


def test_in_an_interpreted_plan(model: Path) -> None:
    """Steps of a plan are padded: padding rows have the fill value."""
    engine = build(model, "none", LIMITS)
    with engine.llm(num_blocks=32) as llm:
        compare(llm, engine.graph, 0.1)


def test_through_the_driver_of_a_gpu(model: Path) -> None:
    """Declared inputs are copied like the others, with one row per token of a step."""
    built = build(model, "none", LIMITS)
    executor, driver = OnDisk(built.engine(), built, built.objects()).executor()
    driver.calls.clear()
    with LLM(built.manifest, executor) as llm:
        compare(llm, built.graph, 0.1)
    there, back = (driver.calls.count(f"cuMemcpy{way}Async") for way in ("HtoD", "DtoH"))
    assert 4 * back <= there
    assert not driver.live and not driver.memory


def test_what_kernels_read_of_an_input_ends_with_the_rows_of_a_step(model: Path) -> None:
    """Every compile proves this for all kernels; a read of one more row would be found."""
    program = build(model, "none", LIMITS).program
    name, step = next(pair for pair in program.kernel_steps.items() if isinstance(pair[1], Steered))
    alone = msgspec.structs.replace(program, kernels={name: step.op}, steps=(step,), plan=None)
    planned = plan_program(alone, LIMITS, Tuner(TARGETS["h100"]))
    ir = {key: plain_ir(spec) for key, spec in planned.specs().items()}
    assert not plan_faults(alone, LIMITS, planned, ir)
    [(key, spec)] = [(key, spec) for key, spec in planned.specs().items() if spec.entry == "steered"]
    beyond = replace(spec, source=spec.source.replace("axes + 2", "axes + 3"))
    assert plan_faults(alone, LIMITS, planned, ir | {key: plain_ir(beyond)}).keys() == {key}


def test_the_text_of_a_graph_tells_what_it_declares(model: Path) -> None:
    text = print_graph(optimized(model))
    assert text.startswith("graph(%token_ids: i64[T], %positions: i64[T] < 40, ")
    assert "%steer: bf16[T, 64], %mark: i32[T] = -1, %axes: i8[T, 3]" in text
    assert print_graph(parse_graph(text)) == text

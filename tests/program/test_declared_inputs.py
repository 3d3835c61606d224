"""Declared inputs in existing ops: sums, products, gathers and slices of rows of every allowed type, on both back ends,
against the reference."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from graph_tracing import IDS, Value, aten, difference, icc, trace
from icc.compiler.backends.triton.backend import TritonBackend
from icc.compiler.backends.triton.plan import make_plan, plan_program
from icc.compiler.backends.triton.tiling.choice import Tuner
from icc.compiler.graph.graph import Graph
from icc.compiler.graph.interpret import interpret
from icc.compiler.graph.together import logits_of
from icc.compiler.measure.interpret import InterpretDevice
from icc.compiler.program.lower import LowerOptions, lower
from icc.compiler.program.verify import verify_lowered, verify_plan
from icc.compiler.targets import TARGETS
from icc.passes.quantize.stream import stream
from icc.runtime.batch.scheduled import ScheduledBatch, ScheduledSequence
from icc.runtime.executor.player import Player
from icc.runtime.format.batch import BatchArray
from icc.runtime.format.manifest import Limits
from run_lowered import lower_graph, optimize, run_lowered
from torch import Tensor

WIDTH = 16
FLOATS = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
KIND = torch.tensor([0, 1, 1, 0, 2, 2, 0, 1, 2], dtype=torch.int32)


def graph(dtype: str) -> Graph:
    def fn(x: Value, rows: Value, kind: Value, table: Value, w: Value) -> Value:
        halves = aten.cat.default([rows.slice(1, WIDTH // 2, WIDTH), rows.slice(1, 0, WIDTH // 2)], 1)
        return x * 0.5 + halves + icc.linear.default(rows, w, None) + icc.embedding.default(kind, table)

    declared = {"rows": BatchArray("rows", ("T", WIDTH), dtype), "kind": BatchArray("kind", ("T",))}
    return optimize(trace(fn, x=f"f32[T, {WIDTH}]", **declared, table=f"f32[3, {WIDTH}]", w=f"f32[{WIDTH}, {WIDTH}]"))


def given(dtype: str) -> tuple[dict[str, Tensor], dict[str, bytes]]:
    rows = torch.randn(len(IDS), WIDTH, generator=torch.Generator().manual_seed(0)).to(FLOATS[dtype])
    return {"rows": rows, "kind": KIND}, {
        "rows": rows.view(torch.int8).numpy().tobytes(),
        "kind": KIND.numpy().tobytes(),
    }


def test_calibration_has_nothing_for_them() -> None:
    """Calibration and measurements run many sequences at once without these inputs: every row has its fill value."""
    wanted = interpret(graph("bf16"), IDS)
    [found] = logits_of(graph("bf16"), [IDS])
    assert torch.equal(found, wanted)
    seen: list[Tensor] = []
    end = graph("bf16")
    stream(end, [IDS], [end.output], lambda node, inputs: seen.extend(rows for (rows,) in inputs.values()))
    assert seen and all(len(rows) == len(IDS) for rows in seen)


@pytest.mark.parametrize("dtype", FLOATS)
def test_on_the_cpu(dtype: str, tmp_path: Path) -> None:
    tensors, extras = given(dtype)
    found = run_lowered(lower_graph(graph(dtype)), tmp_path, IDS, extras=extras)
    assert difference(interpret(graph(dtype), IDS, extras=tensors), torch.from_numpy(found)) < 1e-5


@pytest.mark.parametrize("dtype", FLOATS)
def test_in_an_interpreted_plan(dtype: str) -> None:
    backend, limits = TritonBackend(TARGETS["h100"], "f32"), Limits(32, 4, 32)
    lowered = lower(graph(dtype), LowerOptions(backend.kv_dtype, backend.profile, 16))
    verify_lowered(lowered.program, backend.refusal)
    planned = plan_program(lowered.program, limits, Tuner(TARGETS["h100"]))
    program = msgspec.structs.replace(lowered.program, plan=make_plan(planned, TARGETS["h100"], {}))
    verify_plan(program)
    packed = {name: backend.pack(source) for name, source in lowered.sources.items()}
    player = Player(InterpretDevice(program, planned.specs(), packed, limits, 8))
    (tensors, extras), table = given(dtype), tuple(range(-(-len(IDS) // 16)))
    sequence = ScheduledSequence(1, tuple(IDS), 0, (table,), len(IDS), extras=extras)
    found = player.step(ScheduledBatch((sequence,)))
    assert difference(interpret(graph(dtype), IDS, extras=tensors), torch.from_numpy(found.copy())) < 1e-5

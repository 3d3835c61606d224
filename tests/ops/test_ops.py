"""Every op of the dialect, by its own samples: fake, reference, cost, and the lowered kernel of the CPU backend.

All samples become one graph, which goes through the passes and the lowering to one library, so that the kernels get
operands as in real graphs.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from graph_tracing import OPS, Value, aten, difference, icc, random, trace
from icc.compiler.graph.interpret import interpret
from run_lowered import lower_graph, optimize, run_lowered
from sample_graph import TOKENS, SampleGraph, as_double, map_tensors, results, samples_of
from torch import Tensor

SAMPLES = samples_of(*OPS.values())
# collectives run in tests/cpu/test_ranks.py
ALONE = [sample for sample, (name, _) in SAMPLES.items() if not OPS[name].traits.collective]


def test_every_op_has_samples_and_a_cost() -> None:
    own = [op for op in OPS.values() if not op.name.startswith(("acme.", "outside."))]  # declared by other tests
    lowered = [op for op in own if op.instructions is None]
    assert {name for name, _ in SAMPLES.values()} == {op.name for op in lowered}
    assert all(op.cost is not None or op.traits.moves_only for op in lowered)
    assert all(op.doc for op in own)


@pytest.mark.parametrize("sample", SAMPLES)
def test_fake_equals_real(sample: str) -> None:
    name, args = SAMPLES[sample]
    real = results(OPS[name].overload(*args))
    fake = results(OPS[name].overload(*map_tensors(lambda t: t.to("meta"), args)))
    assert [(r.shape, r.dtype) for r in real] == [(f.shape, f.dtype) for f in fake]


@pytest.mark.parametrize("sample", SAMPLES)
def test_float32_is_within_the_tolerance(sample: str) -> None:
    name, args = SAMPLES[sample]
    for single, double in zip(
        results(OPS[name].reference(*args)), results(OPS[name].reference(*map_tensors(as_double, args))), strict=True
    ):
        assert difference(double, single) <= OPS[name].tolerance


@pytest.mark.parametrize("sample", [s for s, (name, _) in SAMPLES.items() if not OPS[name].traits.moves_only])
def test_cost_is_positive(sample: str) -> None:
    """Ops that only move elements cost nothing: they become strides, or part of a copy."""
    name, args = SAMPLES[sample]
    assert OPS[name].cost is not None
    cost = OPS[name].cost(*args)  # type: ignore[misc]
    assert cost.bytes > 0 and cost.flops >= 0


@pytest.fixture(scope="module")
def lowered_ops(tmp_path_factory: pytest.TempPathFactory) -> tuple[SampleGraph, Tensor]:
    """The samples and the logits that the CPU library computes."""
    made = SampleGraph({sample: SAMPLES[sample] for sample in ALONE})
    lowered = lower_graph(optimize(made.graph))
    logits = run_lowered(lowered, tmp_path_factory.mktemp("ops"), list(range(TOKENS)))
    return made, torch.from_numpy(logits)


@pytest.mark.parametrize("sample", [s for s in ALONE if SAMPLES[s][0] != "select_rows"])
def test_the_cpu_kernel_is_within_the_tolerance(sample: str, lowered_ops: tuple[SampleGraph, Tensor]) -> None:
    made, logits = lowered_ops
    name = SAMPLES[sample][0]
    for slot in made.slots[sample]:
        rows, size = slot.expected.shape
        found = logits[:rows, slot.start : slot.start + size]
        assert difference(slot.expected, found) <= OPS[name].tolerance


def test_any_logit_rows(tmp_path: Path) -> None:
    """select_rows: repeated and unordered rows."""

    def fn(x: Value, w: Value, head: Value) -> Value:
        return aten.tanh.default(icc.linear.default(icc.rms_norm.default(x * x, w, 1e-5), head, None))

    graph = optimize(trace(fn, x="f32[T, 40]", w="f32[40]", head=random("head", (33, 40))))
    ids, rows = [3, 5, 5, 15, 0], [4, 0, 4, 2]
    found = run_lowered(lower_graph(graph), tmp_path, ids, rows)
    assert found.dtype == np.float32
    assert difference(interpret(graph, ids, rows), torch.from_numpy(found)) < 1e-5

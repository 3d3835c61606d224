"""Every op of the dialect, by its own samples: fake, reference, cost, and the lowered kernel of the CPU backend.

All samples become one graph, which goes through the passes and the lowering to one library, so that the kernels meet
operands as graphs have them: gathers, views, slices of wider buffers, concatenations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from graph_tracing import OPS, Value, aten, cat, difference, empty_graph, icc, random, trace
from icc.compiler.graph.graph import TensorType
from icc.compiler.graph.interpret import interpret
from icc.compiler.weights.handles import Constant
from run_lowered import lower_graph, optimize, run_lowered
from torch import Tensor

TOKENS = 21
convert = torch.ops.prims.convert_element_type.default


def _samples() -> dict[str, tuple[str, tuple[Any, ...]]]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return {
            f"{name}-{i}": (name, args)
            for name, op in OPS.items()
            for i, args in enumerate(op.samples() if op.samples else ())
        }


SAMPLES = _samples()


def _map(fn: Callable[[Tensor], Any], value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_map(fn, v) for v in value)
    return fn(value) if isinstance(value, Tensor) else value


def _results(value: Any) -> list[Tensor]:
    return list(value) if isinstance(value, (tuple, list)) else [value]


def _double(value: Tensor) -> Tensor:
    return value.double() if value.is_floating_point() else value


def test_every_op_has_samples_and_a_cost() -> None:
    assert {name for name, _ in SAMPLES.values()} == set(OPS)
    assert all(op.cost is not None and op.doc and op.kernels for op in OPS.values())


@pytest.mark.parametrize("sample", SAMPLES)
def test_fake_equals_real(sample: str) -> None:
    name, args = SAMPLES[sample]
    real = _results(OPS[name].overload(*args))
    fake = _results(OPS[name].overload(*_map(lambda t: t.to("meta"), args)))
    assert [(r.shape, r.dtype) for r in real] == [(f.shape, f.dtype) for f in fake]


@pytest.mark.parametrize("sample", SAMPLES)
def test_float32_is_within_the_tolerance(sample: str) -> None:
    name, args = SAMPLES[sample]
    for single, double in zip(
        _results(OPS[name].reference(*args)), _results(OPS[name].reference(*_map(_double, args))), strict=True
    ):
        assert difference(double, single) <= OPS[name].tolerance


@pytest.mark.parametrize("sample", SAMPLES)
def test_cost_is_positive(sample: str) -> None:
    name, args = SAMPLES[sample]
    assert OPS[name].cost is not None
    cost = OPS[name].cost(*args)  # type: ignore[misc]
    assert cost.bytes > 0 and cost.flops >= 0


# which arguments of an op are constants of a model; all other tensors depend on tokens
CONSTANT = {
    "embedding": (1,), "linear": (1, 2), "expert_linear": (1, 2), "rms_norm": (1,), "add_rms_norm": (2,),
    "layer_norm": (1, 2), "add_layer_norm": (2, 3), "attention": (3, 4), "paged_attention": (4, 5, 6, 7, 8, 9),
}  # fmt: skip


@dataclass
class Slot:
    """Where a sample's results lie in the logits, and what they should be."""

    start: int
    expected: Tensor


class AllOps:
    """One graph of all samples. A token's values are gathered by its id, which is its position."""

    def __init__(self) -> None:
        self.graph = empty_graph()
        self.slots: dict[str, list[Slot]] = {}
        self._inputs: dict[str, Value] = {}
        for name in ("token_ids", "positions"):
            node = self.graph.fx.placeholder(name)
            node.meta["type"] = TensorType("tokens", (), torch.int64)
            self._inputs[name] = Value(self.graph, node)
        parts: list[Value] = []
        for number, (sample, (name, args)) in enumerate(SAMPLES.items()):
            if name != "select_rows":  # the last step of every program selects rows
                self._add(sample, name, args, number, parts)
        self.graph.fx.output(cat(parts, 1).node)

    def _add(self, sample: str, name: str, args: tuple[Any, ...], number: int, parts: list[Value]) -> None:
        constants = CONSTANT.get(name, ())
        values = []
        for i, arg in enumerate(args):
            label = f"{sample}.{i}"
            if isinstance(arg, list):
                shared = [t.dim() < max(u.dim() for u in arg) for t in arg]
                values.append(
                    [self._value(t, f"{label}.{j}", s) for j, (t, s) in enumerate(zip(arg, shared, strict=True))]
                )
            elif isinstance(arg, Tensor):
                one_row = name == "bmm" and i == 1 and arg.shape[0] != args[0].shape[0]
                values.append(
                    self._value(arg.expand(args[0].shape[0], *arg.shape[1:]) if one_row else arg, label, i in constants)
                )
            else:
                values.append(arg)
        if name in ("attention", "paged_attention"):
            values[5 if name == "attention" else 10] = number  # each its own KV cache
        if name == "paged_attention":
            values[3] = self._inputs["positions"]
        real = _results(OPS[name].reference(*_map(_double, args)))
        self.slots[sample] = []
        for value, expected in zip(_results(OPS[name].overload(*values)), real, strict=True):
            size = expected[0].numel()
            start = sum(p.node.meta["type"].shape[0] for p in parts)
            parts.append(
                convert(value.view(-1, size), torch.float32)
                if not expected.is_floating_point()
                else value.view(-1, size)
            )
            self.slots[sample].append(Slot(start, expected.reshape(len(expected), size)))

    def _value(self, tensor: Tensor, label: str, constant: bool) -> Value:
        if constant:
            return Value(self.graph, self.graph.add_weight(label, Constant(tensor)))
        rows = torch.arange(TOKENS) % len(tensor)
        table = Value(self.graph, self.graph.add_weight(label, Constant(tensor[rows].float())))
        gathered = icc.embedding.default(self._inputs["token_ids"], table)
        return gathered if tensor.is_floating_point() else convert(gathered, torch.int64)


@pytest.fixture(scope="module")
def lowered_ops(tmp_path_factory: pytest.TempPathFactory) -> tuple[AllOps, Tensor]:
    """The samples and the logits that the CPU library computes."""
    made = AllOps()
    lowered = lower_graph(optimize(made.graph))
    logits = run_lowered(lowered, tmp_path_factory.mktemp("ops"), list(range(TOKENS)))
    return made, torch.from_numpy(logits)


@pytest.mark.parametrize("sample", [s for s, (name, _) in SAMPLES.items() if name != "select_rows"])
def test_the_cpu_kernel_is_within_the_tolerance(sample: str, lowered_ops: tuple[AllOps, Tensor]) -> None:
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

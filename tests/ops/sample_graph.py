"""Graphs in which ops get operands as in models: gathers, views, slices of wider buffers, concatenations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from graph_tracing import OPS, Value, cat, empty_graph, icc
from icc.compiler.graph.tensor_types import TensorType
from icc.compiler.ops import AttentionSpec, Op
from icc.compiler.weights.handles import Constant
from torch import Tensor

TOKENS = 21
convert = torch.ops.prims.convert_element_type.default
Sample = tuple[str, tuple[Any, ...]]  # an op's name, and its arguments


def samples_of(*ops: Op) -> dict[str, Sample]:
    """The samples of `ops` by name, such as "linear-0"."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return {
            f"{op.name}-{i}": (op.name, args) for op in ops for i, args in enumerate(op.samples() if op.samples else ())
        }


def map_tensors(fn: Callable[[Tensor], Any], value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(fn, v) for v in value)
    return fn(value) if isinstance(value, Tensor) else value


def results(value: Any) -> list[Tensor]:
    return list(value) if isinstance(value, (tuple, list)) else [value]


def as_double(value: Tensor) -> Tensor:
    return value.double() if value.is_floating_point() else value


@dataclass
class Slot:
    """The place of a sample's results in the logits, and their expected values."""

    start: int
    expected: Tensor


class SampleGraph:
    """One graph of many samples. A token's values are gathered by its id, which is its position."""

    def __init__(self, samples: dict[str, Sample]) -> None:
        self.graph = empty_graph()
        self.slots: dict[str, list[Slot]] = {}
        self._inputs: dict[str, Value] = {}
        for name in ("token_ids", "positions"):
            node = self.graph.fx.placeholder(name)
            node.meta["type"] = TensorType("tokens", (), torch.int64)
            self._inputs[name] = Value(self.graph, node)
        parts: list[Value] = []
        for number, (sample, (name, args)) in enumerate(samples.items()):
            if name != "select_rows":  # the last step of every program selects rows
                self._add(sample, name, args, number, parts)
        self.graph.returns(logits=cat(parts, 1).node)

    def _add(self, sample: str, name: str, args: tuple[Any, ...], number: int, parts: list[Value]) -> None:
        constants = OPS[name].traits.weights
        values = []
        for i, arg in enumerate(args):
            label = f"{sample}.{i}"
            if isinstance(arg, list) and isinstance(arg[0], Tensor):
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
        if OPS[name].traits.stateful:  # each has its own KV cache or state
            names = list(OPS[name].parameters)
            if "layer" in names:
                values[names.index("layer")] = number
            values = [replace(v, layer=number) if isinstance(v, AttentionSpec) else v for v in values]
        if name == "paged_attention":
            values[3] = self._inputs["positions"]
        real = results(OPS[name].reference(*map_tensors(as_double, args)))
        self.slots[sample] = []
        for value, expected in zip(results(OPS[name].overload(*values)), real, strict=True):
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

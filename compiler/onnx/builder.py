"""An ONNX graph while it is written: nodes named after their modules, and constants and weights stored once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from onnx import GraphProto, NodeProto, TensorProto, helper

MICROSOFT = "com.microsoft"  # onnxruntime's domain, with MatMulNBits
TYPES: dict[torch.dtype, int] = {
    torch.float32: TensorProto.FLOAT,
    torch.float64: TensorProto.DOUBLE,
    torch.float16: TensorProto.FLOAT16,
    torch.bfloat16: TensorProto.BFLOAT16,
    torch.float8_e4m3fn: TensorProto.FLOAT8E4M3FN,
    torch.int64: TensorProto.INT64,
    torch.int32: TensorProto.INT32,
    torch.int8: TensorProto.INT8,
    torch.uint8: TensorProto.UINT8,
    torch.bool: TensorProto.BOOL,
}


@dataclass(frozen=True)
class Initializer:
    """A constant of the file, whose dtype and shape are known before its values."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The number of bytes of its values."""
        return int(np.prod(self.shape, dtype=object)) * self.dtype.itemsize


@dataclass(frozen=True)
class StoredInitializers:
    """Initializers whose values are computed together, such as the codes and scales of one weight. load: their values
    [..], in order; called once, while the file is written."""

    initializers: tuple[Initializer, ...]
    load: Callable[[], Sequence[torch.Tensor]]


@dataclass
class Builder:
    """Collects nodes in order. `at` sets the module of the model that the next nodes belong to."""

    nodes: list[NodeProto] = field(default_factory=list)
    stored: list[StoredInitializers] = field(default_factory=list)
    domains: set[str] = field(default_factory=lambda: {""})
    module: str = ""
    _names: Counter[str] = field(default_factory=Counter)
    _constants: dict[Any, str] = field(default_factory=dict)
    _shared: dict[Any, str] = field(default_factory=dict)

    @contextmanager
    def at(self, module: str) -> Iterator[None]:
        """Name what is added after this module, as torch's exporter does: /model/layers.0/mlp/act_fn/Mul."""
        before, self.module = self.module, module
        try:
            yield
        finally:
            self.module = before

    def unique(self, name: str) -> str:
        """`name`, with a number appended if it is taken."""
        self._names[name] += 1
        return name if self._names[name] == 1 else f"{name}_{self._names[name] - 1}"

    def add(self, op: str, *inputs: str, outputs: int = 1, domain: str = "", **attributes: Any) -> Any:
        """Append a node, and return the name of its output, or a list of names. "" is a missing input."""
        path = f"/{_path(self.module)}" if self.module else ""
        name = self.unique(f"{path}/{op}")
        results = [f"{name}_output_{i}" for i in range(outputs)]
        given = list(inputs)
        while given and not given[-1]:
            given.pop()
        self.domains.add(domain)
        self.nodes.append(helper.make_node(op, given, results, name=name, domain=domain, **attributes))
        return results[0] if outputs == 1 else results

    def constant(self, value: Any, dtype: torch.dtype) -> str:
        """A small constant: a number, or a list of numbers. Equal constants share one initializer."""
        key = (repr(value), dtype)
        if key not in self._constants:
            tensor = torch.tensor(value, dtype=dtype)
            name = self.unique(f"constant/{str(dtype).removeprefix('torch.')}{list(tensor.shape) or ''}")
            self.store(name, tensor)
            self._constants[key] = name
        return self._constants[key]

    def ints(self, *values: int) -> str:
        """An int64 constant [n], for shapes, axes and bounds."""
        return self.constant(list(values), torch.int64)

    def number(self, value: float) -> str:
        """A constant float32 scalar."""
        return self.constant(float(value), torch.float32)

    def store(self, name: str, value: torch.Tensor) -> str:
        """An initializer with values, of any shape, that are in memory already."""
        self.stored.append(StoredInitializers((Initializer(name, value.dtype, tuple(value.shape)),), lambda: [value]))
        return name

    def once(self, key: Any, make: Callable[[], str], module: str = "") -> str:
        """The result of `make`, which is called only once per `key`; its nodes are named after `module`."""
        if key not in self._shared:
            with self.at(module):
                self._shared[key] = make()
        return self._shared[key]

    def cast(self, value: str, dtype: torch.dtype) -> str:
        """A conversion to another dtype."""
        return self.add("Cast", value, to=TYPES[dtype])

    def reshape(self, value: str, *shape: int) -> str:
        """A reshape; one size may be -1."""
        return self.add("Reshape", value, self.ints(*shape))

    @contextmanager
    def body(self) -> Iterator[list[NodeProto]]:
        """A context in which nodes are appended to the list that it yields, for the graph of a Loop."""
        outer, self.nodes = self.nodes, []
        try:
            yield self.nodes
        finally:
            self.nodes = outer

    def subgraph(self, nodes: list[NodeProto], inputs: Sequence[Any], outputs: Sequence[Any]) -> GraphProto:
        """The graph of a Loop's body."""
        return helper.make_graph(nodes, self.unique("body"), list(inputs), list(outputs))


def _path(module: str) -> str:
    """model.layers.0.mlp as model/layers.0/mlp: a number stays with the name of its list."""
    parts: list[str] = []
    for part in filter(None, module.split(".")):
        if part.isdecimal() and parts:
            parts[-1] += f".{part}"
        else:
            parts.append(part)
    return "/".join(parts)

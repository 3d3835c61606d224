"""Collects kernels, weights, buffers and steps while a graph is lowered. Equal kernels are kept once."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from ....runtime.engine.program import ITEM_SIZE, Buffer, Kernel, KVLayer, Operand, Step, Weight
from ...graph.weights import Weight as Handle
from .placed import Placed, contiguous

ABSENT = Operand("none")


@dataclass(frozen=True)
class WeightSource:
    """What is packed under a name: a handle and the packed format (see cpu/formats.py)."""

    handle: Handle
    format: str
    group: int
    shape: tuple[int, ...]


@dataclass
class VirtualBuffer:
    """A buffer before the memory plan: bytes per row and the steps between which it lives."""

    name: str
    dtype: str
    size: int
    rows: str
    first: int
    last: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.size * ITEM_SIZE[self.dtype]


@dataclass
class ProgramBuilder:
    """The program under construction. Buffers are virtual until memory.py places them."""

    kernels: dict[str, Kernel] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    buffers: dict[str, VirtualBuffer] = field(default_factory=dict)
    weights: dict[str, WeightSource] = field(default_factory=dict)
    kv_layers: dict[int, KVLayer] = field(default_factory=dict)
    origins: list[str] = field(default_factory=list)
    _kernel_names: dict[str, str] = field(default_factory=dict)

    def buffer(self, shape: tuple[int, ...], dtype: str, rows: str) -> Placed:
        """A new contiguous buffer."""
        name = f"b{len(self.buffers)}"
        strides = contiguous(shape)
        placed = Placed("buffer", name, 0, shape, strides, 0, dtype, rows)
        placed = Placed("buffer", name, 0, shape, strides, placed.size, dtype, rows)
        self.buffers[name] = VirtualBuffer(name, dtype, placed.size, rows, len(self.steps), len(self.steps))
        return placed

    def weight(self, name: str, source: WeightSource) -> Operand:
        """Register a weight; one name in two formats becomes two weights."""
        key = name
        while key in self.weights and self.weights[key] != source:
            same = self.weights[key]
            if same.handle is source.handle and same.format == source.format and same.shape == source.shape:
                return Operand("weight", key)
            key += "'"
        self.weights[key] = source
        return Operand("weight", key)

    def step(
        self,
        op: str,
        params: dict[str, Any],
        inputs: list[Operand],
        outputs: list[Operand],
        layer: int = -1,
        origin: str = "",
    ) -> None:
        """Append one launch."""
        key = json.dumps([op, params], sort_keys=True)
        if key not in self._kernel_names:
            number = sum(1 for k in self.kernels.values() if k.op == op)
            name = f"{op}_{number}"
            self._kernel_names[key] = name
            self.kernels[name] = Kernel(op, params)
        index = len(self.steps)
        for operand in (*inputs, *outputs):
            if operand.space == "buffer":
                found = self.buffers[operand.name]
                found.last = index
                found.first = min(found.first, index)
        self.steps.append(Step(self._kernel_names[key], inputs, outputs, layer))
        self.origins.append(origin)


def program_weight(source: WeightSource, nbytes: int) -> Weight:
    """The program's record of a packed weight."""
    return Weight(source.format, list(source.shape), nbytes)


def program_buffer(virtual: VirtualBuffer, offset: int) -> Buffer:
    """The program's record of a placed buffer."""
    return Buffer(virtual.name, virtual.dtype, [virtual.size], virtual.rows, offset)

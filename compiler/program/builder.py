"""Collects kernels, weights, buffers and steps while a graph is lowered. Equal kernels are kept once."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from math import prod
from typing import Any

import msgspec

from ...runtime.format.kv import KVLayer
from ...runtime.format.program import DRAFTS, ITEM_SIZE, Buffer, Kernel, Operand, Step, Weight
from ..weights.handles import Weight as Handle
from .layout import Layout
from .params import written
from .placed import Placed, contiguous

ABSENT = Operand("none")


@dataclass(frozen=True)
class WeightSource:
    """What is packed under a name: a handle and how it lies in memory."""

    handle: Handle
    layout: Layout
    shape: tuple[int, ...]


@dataclass
class VirtualBuffer:
    """A buffer before the memory plan: bytes per row and the steps between which it lives."""

    name: str
    dtype: str
    size: int
    rows: str
    first: int = -1
    last: int = -1

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.size * ITEM_SIZE[self.dtype]


@dataclass(frozen=True)
class Record:
    """One launch before kernels are named. `origin` is the module that it came from."""

    op: str
    params: dict[str, Any]
    inputs: list[Operand]
    outputs: list[Operand]
    layer: int
    origin: str


@dataclass
class ProgramBuilder:
    """The program under construction. Buffers are virtual until memory.py places them."""

    records: list[Record] = field(default_factory=list)
    buffers: dict[str, VirtualBuffer] = field(default_factory=dict)
    weights: dict[str, WeightSource] = field(default_factory=dict)
    kv_layers: dict[int, tuple[KVLayer, int]] = field(default_factory=dict)  # each with its window, 0 for none

    def buffer(self, shape: tuple[int, ...], dtype: str, rows: str) -> Placed:
        """A new contiguous buffer."""
        name = f"b{len(self.buffers)}"
        strides = contiguous(shape)
        placed = Placed("buffer", name, 0, shape, strides, prod(shape), dtype, rows)
        self.buffers[name] = VirtualBuffer(name, dtype, placed.size, rows)
        return placed

    def weight(self, name: str, source: WeightSource) -> Operand:
        """Register a weight; one name in two formats becomes two weights."""
        key = name
        while key in self.weights and self.weights[key] != source:
            same = self.weights[key]
            if same.handle is source.handle and same.layout == source.layout and same.shape == source.shape:
                return Operand("weight", key)
            key += "'"
        self.weights[key] = source
        return Operand("weight", key)

    def live_buffers(self) -> list[VirtualBuffer]:
        """The buffers that some record touches, with their lifetimes as indices of records."""
        for index, record in enumerate(self.records):
            for operand in (*record.inputs, *record.outputs):
                if operand.space == "buffer":
                    found = self.buffers[operand.name]
                    found.last = index
                    found.first = index if found.first < 0 else found.first
        return [b for b in self.buffers.values() if b.last >= 0]

    def steps(self, typed: bool) -> tuple[dict[str, Kernel], list[Step]]:
        """Kernels by name, equal ones once, and the steps that launch them; `typed`: with facts on operands."""
        kernels: dict[str, Kernel] = {}
        names: dict[bytes, str] = {}
        counts: Counter[str] = Counter()
        steps: list[Step] = []
        for record in self.records:
            facts = self._operand_facts([*record.inputs, *record.outputs]) if typed else {}
            params = written({**record.params, **facts})
            key = msgspec.json.encode([record.op, params], order="sorted")
            if key not in names:
                names[key] = f"{record.op}_{counts[record.op]}"
                counts[record.op] += 1
                kernels[names[key]] = Kernel(record.op, params)
            steps.append(Step(names[key], record.inputs, record.outputs, record.layer))
        return kernels, steps

    def _operand_facts(self, operands: list[Operand]) -> dict[str, Any]:
        """`types` (element type, "" for none) and `aligned` (to 16 bytes) of each operand."""
        types = [self._element_type(operand) for operand in operands]
        aligned = [o.offset * ITEM_SIZE.get(t, 1) % 16 == 0 for o, t in zip(operands, types, strict=True)]
        return {"types": types, "aligned": aligned}

    def _element_type(self, operand: Operand) -> str:
        if operand.space == "buffer":
            return self.buffers[operand.name].dtype
        if operand.space == "weight":
            kind = self.weights[operand.name].layout.name
            return kind if kind in ITEM_SIZE else "u8"
        if operand.space == "output" and operand.name == DRAFTS:
            return "i32"
        return {"input": "i32", "output": "f32", "none": ""}[operand.space]


def program_weight(source: WeightSource) -> Weight:
    """The program's record of a packed weight."""
    return Weight(source.layout.name, list(source.shape), source.layout.nbytes(source.shape))


def program_buffer(virtual: VirtualBuffer, offset: int) -> Buffer:
    """The program's record of a placed buffer."""
    return Buffer(virtual.name, virtual.dtype, [virtual.size], virtual.rows, offset)

"""Collects weights, buffers and steps while a graph is lowered, and names their kernels: equal ones once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable
from dataclasses import dataclass, field
from math import prod

import msgspec

from ...runtime.format.elements import ITEM_SIZE
from ...runtime.format.kv import KVLayer
from ...runtime.format.operands import BufferOperand, WeightOperand
from ...runtime.format.program import Buffer, WeightEntry
from ..eviction import Eviction
from ..weights.handles import Weight as Handle
from .layout import Layout
from .placed import Placed, contiguous
from .steps.base import Step, kernel_key


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
    """One step before its kernel is named. `origin` is the module that it came from."""

    step: Step
    origin: str


@dataclass(frozen=True)
class Cached:
    """What a KV layer holds of a token, and of which tokens: the last `window`, or all (0), or those of a step
    (WITHIN_STEP); or what a policy keeps."""

    layer: KVLayer
    dtype: str
    window: int
    policy: Eviction | None = None


@dataclass(frozen=True)
class Marks:
    """Where the parts of a program end, as numbers of records: those of a step, those and the draft heads' section, and
    those that an early exit shares with a step."""

    own: int
    heads: int
    shared: int

    def without(self, removed: Collection[int]) -> Marks:
        """The same parts once the records at these places are gone."""
        return Marks(*(mark - sum(at < mark for at in removed) for mark in (self.own, self.heads, self.shared)))


@dataclass
class ProgramBuilder:
    """The program under construction. Buffers are virtual until memory.py places them."""

    records: list[Record] = field(default_factory=list)
    buffers: dict[str, VirtualBuffer] = field(default_factory=dict)
    weights: dict[str, WeightSource] = field(default_factory=dict)
    kv_layers: dict[int, Cached] = field(default_factory=dict)

    def buffer(self, shape: tuple[int, ...], dtype: str, rows: str) -> Placed:
        """A new contiguous buffer."""
        name = f"b{len(self.buffers)}"
        strides = contiguous(shape)
        placed = Placed("buffer", name, 0, shape, strides, prod(shape), dtype, rows)
        self.buffers[name] = VirtualBuffer(name, dtype, placed.size, rows)
        return placed

    def weight(self, name: str, source: WeightSource) -> WeightOperand:
        """Register a weight; one name in two formats becomes two weights."""
        key = name
        while key in self.weights and self.weights[key] != source:
            same = self.weights[key]
            if same.handle is source.handle and same.layout == source.layout and same.shape == source.shape:
                break
            key += "'"
        self.weights[key] = source
        return WeightOperand(key, source.layout.name if source.layout.name in ITEM_SIZE else "u8")

    def live_buffers(self) -> list[VirtualBuffer]:
        """The buffers that some record touches, with their lifetimes as indices of records."""
        for index, record in enumerate(self.records):
            for operand in record.step.operands.values():
                if isinstance(operand, BufferOperand):
                    found = self.buffers[operand.name]
                    found.last = index
                    found.first = index if found.first < 0 else found.first
        return [b for b in self.buffers.values() if b.last >= 0]

    def steps(self, by_alignment: bool) -> tuple[dict[str, str], tuple[Step, ...]]:
        """The op of every kernel by name, and the steps that launch them; see `kernel_key`."""
        kernels: dict[str, str] = {}
        names: dict[Hashable, str] = {}
        counts: Counter[str] = Counter()
        steps: list[Step] = []
        for record in self.records:
            key, op = kernel_key(record.step, by_alignment), record.step.op
            if key not in names:
                names[key] = f"{op}_{counts[op]}"
                counts[op] += 1
                kernels[names[key]] = op
            steps.append(msgspec.structs.replace(record.step, kernel=names[key]))
        return kernels, tuple(steps)


def program_weight(source: WeightSource) -> WeightEntry:
    """The program's record of a packed weight."""
    return WeightEntry(source.layout.name, list(source.shape), source.layout.nbytes(source.shape))


def program_buffer(virtual: VirtualBuffer, offset: int) -> Buffer:
    """The program's record of a placed buffer."""
    return Buffer(virtual.name, virtual.dtype, [virtual.size], virtual.rows, offset)

"""Collects weights, buffers and steps while a graph is lowered, and names kernels, one for all equal steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from math import prod

import msgspec

from ...runtime.format.adapters import AdapterPlan
from ...runtime.format.batch import BatchArray
from ...runtime.format.elements import ITEM_SIZE
from ...runtime.format.kv import KVLayer
from ...runtime.format.operands import BufferOperand, WeightOperand
from ...runtime.format.program import Buffer, Section, SectionArray, WeightEntry
from ..eviction import Eviction
from ..weights.handles import Weight as Handle
from ..weights.same import same_weight
from .layout import Layout
from .placed import Placed, contiguous
from .steps.base import Step, kernel_key


@dataclass(frozen=True)
class WeightSource:
    """A weight to pack: its handle and its layout in memory."""

    handle: Handle
    layout: Layout
    shape: tuple[int, ...]

    def equals(self, other: WeightSource) -> bool:
        """Whether the same bytes would be packed."""
        alike = self.layout == other.layout and self.shape == other.shape
        return alike and same_weight(self.handle, other.handle)


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
    """One step before its kernel is named. `origin` is the module that it came from, `section` the section that it is
    part of, "" for none."""

    step: Step
    origin: str
    section: str = ""


@dataclass(frozen=True)
class Cached:
    """What a KV layer stores of a token, and for which tokens: the last `window`, all (0), those of a step
    (WITHIN_STEP), or the ones that a policy keeps."""

    layer: KVLayer
    dtype: str
    window: int
    policy: Eviction | None = None


@dataclass
class ProgramBuilder:
    """The program under construction. Buffers are virtual until memory.py places them. section: the section of the
    records that are being appended. given, gives: the inputs and outputs of each section, by name. instead: the
    sections that run in place of the program, with the input that says when. declared: the inputs of the graphs besides
    the fixed ones. adapters: the adapter slots; None for none."""

    records: list[Record] = field(default_factory=list[Record])
    buffers: dict[str, VirtualBuffer] = field(default_factory=dict[str, VirtualBuffer])
    weights: dict[str, WeightSource] = field(default_factory=dict[str, WeightSource])
    kv_layers: dict[int, Cached] = field(default_factory=dict[int, Cached])
    section: str = ""
    given: dict[str, dict[str, SectionArray]] = field(default_factory=dict[str, dict[str, SectionArray]])
    gives: dict[str, dict[str, SectionArray]] = field(default_factory=dict[str, dict[str, SectionArray]])
    instead: dict[str, str] = field(default_factory=dict[str, str])
    declared: tuple[BatchArray, ...] = ()
    adapters: AdapterPlan | None = None

    @property
    def given_out(self) -> list[str]:
        """The buffers with results of sections, which are read from outside the program."""
        return [array.at for arrays in self.gives.values() for array in arrays.values() if array.at in self.buffers]

    @property
    def uses(self) -> Counter[str]:
        """How often each buffer is named, by steps and by outputs of the program."""
        operands = (operand for record in self.records for operand in record.step.operands.values())
        found = Counter(operand.name for operand in operands if isinstance(operand, BufferOperand))
        found.update(self.given_out)
        return found

    def append(self, step: Step, origin: str) -> None:
        """Append a record to the section that is being lowered."""
        self.records.append(Record(step, origin, self.section))

    def sections(self) -> list[Section]:
        """The sections. `shared` of one that gives logits: how many leading steps run before it, because they make its
        inputs."""
        found: list[Section] = []
        for name, gives in self.gives.items():
            places = [at for at, record in enumerate(self.records) if record.section == name]
            begin, end = (places[0], places[-1] + 1) if places else (len(self.records), len(self.records))
            section = Section(name, begin, end, 0, self.given[name], gives, self.instead.get(name, ""))
            if section.is_step:
                read = _read_from_before(self.records, section)
                makers = (at for at, r in enumerate(self.records[:begin]) if not read.isdisjoint(_written(r)))
                section = msgspec.structs.replace(section, shared=max(makers, default=-1) + 1)
            found.append(section)
        return found

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
        while key in self.weights and not self.weights[key].equals(source):
            key += "'"
        self.weights.setdefault(key, source)
        return WeightOperand(key, source.layout.name if source.layout.name in ITEM_SIZE else "u8")

    def live_buffers(self, sections: Sequence[Section]) -> list[VirtualBuffer]:
        """The buffers that some record touches, with their lifetimes as indices of records.

        The inputs of a section exist when it begins. Values of a step that a section reads must stay alive to the end,
        because the section may be run at any time after the step.
        """
        for buffer in self.buffers.values():
            buffer.first = buffer.last = -1
        for index, record in enumerate(self.records):
            for operand in record.step.operands.values():
                if isinstance(operand, BufferOperand):
                    found = self.buffers[operand.name]
                    found.last = index
                    found.first = index if found.first < 0 else found.first
        for section in sections:
            for array in (*section.inputs.values(), *section.outputs.values()):
                if found := self.buffers.get(array.at):
                    found.first = min(found.first, section.begin) if found.first >= 0 else section.begin
                    found.last = max(found.last, section.end - 1)
        for section in sections:
            if not section.is_step:
                for name in _read_from_before(self.records, section):
                    self.buffers[name].last = len(self.records) - 1
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


def _written(record: Record) -> set[str]:
    """The buffers that a step writes."""
    return {o.name for o in record.step.outputs.values() if isinstance(o, BufferOperand)}


def _read_from_before(records: Sequence[Record], section: Section) -> set[str]:
    """The buffers that a section reads and none of its steps writes."""
    read, written = set[str](), set[str]()
    for record in records[section.begin : section.end]:
        names = {o.name for o in record.step.inputs.values() if isinstance(o, BufferOperand)}
        read |= names - written
        written |= _written(record)
    return read - {array.at for array in section.inputs.values()}


def program_weight(source: WeightSource) -> WeightEntry:
    """The program's record of a packed weight."""
    return WeightEntry(source.layout.name, list(source.shape), source.layout.nbytes(source.shape))


def program_buffer(virtual: VirtualBuffer, offset: int) -> Buffer:
    """The program's record of a placed buffer."""
    return Buffer(virtual.name, virtual.dtype, [virtual.size], virtual.rows, offset)

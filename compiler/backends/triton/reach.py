"""Checks the memory accesses of a plan's launches: the buffers behind their arguments, and the steps to check."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ....runtime.format.batch import PLAN_ARRAYS, BatchLimits
from ....runtime.format.elements import ITEM_SIZE
from ....runtime.format.exchange import EXCHANGE
from ....runtime.format.footprint import batch_limits
from ....runtime.format.manifest import Limits
from ....runtime.format.operands import BufferOperand, Operand, OutputOperand, WeightOperand
from ....runtime.format.plan import (
    COUNTERS,
    RANK,
    ROWS,
    AreaArg,
    BatchArg,
    Call,
    CountersArg,
    KVArg,
    LaunchArg,
    OperandArg,
    OutputArg,
    OwnRows,
    SampledArg,
    SamplingArg,
    ScratchArg,
    SizeArg,
    whole_rows,
)
from ....runtime.format.program import Program
from .bounds.addresses import address_faults
from .bounds.forms import Number
from .bounds.ttir import TtirFunction, parse
from .bounds.values import Memory, Samples
from .objects.compile import spec_key
from .plan import Planned, PlannedPhase
from .spec import LaunchSpec, Shape

Sizes = Mapping[str, Number]  # of a step
Values = Mapping[str, tuple[Number, Number]]  # least and largest of integers in scratch areas
_LOGITS_BYTES = 256 << 20
_EVERY = 1024  # most programs of a grid that is checked whole; of larger grids the faces and some between
# another kernel's count decides where these kernels write; that is tested, not proved (tests/triton/races.py)
_COUNTED = {"expert_place"}


def plan_faults(program: Program, limits: Limits, planned: Planned, ir: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """By object, what cannot be proved about its accesses and indices, each with a phase in which this is so.

    ir: TTIR by object. Every object is checked in its largest decode and mixed phase, at sizes from the smallest step
    to the largest, with the operands of all steps.
    """
    reach, found = Reach(program, limits), dict[str, dict[str, str]]()
    calls: dict[str, list[Call | None]] = {}
    for call in planned.calls:
        calls.setdefault(call.kernel, []).append(call)
    largest: dict[tuple[str, bool, str], tuple[PlannedPhase, LaunchSpec]] = {}
    for phase in planned.phases:  # by rising size
        for kernel, specs in phase.kernels.items():
            largest |= {
                (spec_key(s), phase.shape.decode, kernel): (phase, s)
                for s in specs
                if s.source and s.entry not in _COUNTED
            }
    # a step kernel touches the same memory as its stages, which are launches as well
    parsed = {key: parse(ir[key]) for key in {key for key, _, _ in largest}}
    seen: dict[str, list[object]] = {}
    for (key, _, kernel), (phase, spec) in largest.items():
        every = reach.faults(phase, kernel, spec, calls.get(kernel, [None]), parsed[key], seen.setdefault(key, []))
        for fault in (fault for faults in every for fault in faults):
            found.setdefault(key, {}).setdefault(fault, f"{phase.shape}")
    return found


@dataclass(frozen=True)
class Reach:
    """Sizes of an engine's memory within its limits.

    Integers read from memory are assumed to be in the range that the host or another kernel writes: ids of blocks below
    what a full batch needs, positions below the longest sequence, slots of experts. Results of the model may be
    anything.
    """

    program: Program
    limits: Limits

    @property
    def batch(self) -> BatchLimits:
        """The largest step."""
        return batch_limits(self.program, self.limits, _LOGITS_BYTES)

    def faults(
        self, phase: PlannedPhase, kernel: str, spec: LaunchSpec, calls: Sequence[Call | None], function: TtirFunction,
        seen: list[object],
    ) -> Iterator[tuple[str, ...]]:  # fmt: skip
        """The faults of one launch, once per distinct kind of operands in `calls`; `seen` collects the kinds."""
        sampled = self.samples(spec, phase.shape)
        if sampled is None:
            return
        sizes, samples = sampled
        for call in calls:
            memory = self.memory(spec, call, phase.areas[kernel], phase.values(kernel, sizes), sizes)
            if any(_same(memory, other) for other in seen):
                continue
            seen.append(memory)
            yield address_faults(function, memory, samples)

    def samples(self, spec: LaunchSpec, shape: Shape) -> tuple[dict[str, Number], Samples] | None:
        """Programs of a launch in steps of a phase, with the sizes of each program's step; None if there are no
        programs."""
        places, sizes = [], []
        for step in self._of_ranks(spec, shape):
            grid = [dim.value(step) for dim in spec.grid]
            if all(grid):
                place = _places(grid)
                places.append(place)
                names = {**step, "x": grid[0], "y": grid[1], "z": grid[2]}
                sizes.append({name: np.full(len(place), size, dtype=np.int64) for name, size in names.items()})
        if not places:
            return None
        every = {name: np.concatenate([one[name] for one in sizes]) for name in sizes[0]}
        place = np.concatenate(places)
        known = {name: _one(value) for name, value in every.items()}
        integers = {n: known[arg.value.name] for n, arg in enumerate(spec.args) if isinstance(arg.value, SizeArg)}
        return known, Samples((place[:, 0], place[:, 1], place[:, 2]), (known["x"], known["y"], known["z"]), integers)

    def _of_ranks(self, spec: LaunchSpec, shape: Shape) -> Iterator[dict[str, int]]:
        """The sizes of some steps of a phase on some of the ranks that launch it, with divided and undivided rows."""
        ranks = _ranks(spec)
        if not any(isinstance(arg.value, SizeArg) and arg.value.name in ROWS for arg in spec.args):
            yield from (step | {RANK: rank} for step in self._steps(shape) for rank in ranks)
            return
        for step in self._steps(shape):
            for rank in ranks:
                for rows in (OwnRows(ranks[-1] + 1, 1).sizes(step["num_tokens"], rank), whole_rows(step["num_tokens"])):
                    yield step | {RANK: rank} | rows

    def _steps(self, shape: Shape) -> Iterator[dict[str, int]]:
        """The sizes of some steps of a phase: the smallest, the largest, and some between."""
        batch = self.batch
        most = min(shape.max_tokens, batch.tokens)
        for tokens in sorted({1, min(3, most), most // 2 + 1, most}):
            few = {tokens} if shape.decode else {1, min(tokens, batch.seqs)}
            for seqs in few:
                rows = min(tokens, batch.logit_rows)
                yield {
                    "num_tokens": tokens, "num_seqs": min(seqs, batch.seqs), "num_logit_rows": rows,
                    "max_blocks": batch.table_stride, "num_moves": tokens,
                }  # fmt: skip

    def memory(
        self,
        spec: LaunchSpec,
        call: Call | None,
        areas: Mapping[str, int],
        values: Values,
        sizes: Sizes,
    ) -> dict[int, Memory]:
        """The memory behind the pointers of a launch, by the argument's number. call: the step that is launched; None
        if the launch has no operands."""
        return {
            number: self._memory(arg.value, call, areas, values, sizes)
            for number, arg in enumerate(spec.args)
            if arg.type.startswith("*")
        }

    def _memory(
        self,
        arg: LaunchArg,
        call: Call | None,
        areas: Mapping[str, int],
        values: Values,
        sizes: Sizes,
    ) -> Memory:
        batch = self.batch
        match arg:
            case OperandArg() if call is not None:
                return self._operand(call.operands[arg.name], sizes)
            case ScratchArg():
                return Memory(areas[arg.name], *values.get(arg.name, (None, None)))
            case CountersArg():
                return Memory(4 * COUNTERS * batch.seqs)
            case AreaArg():
                return Memory(EXCHANGE.nbytes)
            case KVArg() if call is not None:
                layout = self.program.kv
                group = layout.groups[layout.group_of(call.layer)]
                return Memory(self._blocks(call.layer) * group.layer_bytes(call.layer))
            case BatchArg():
                return self._array(arg.name, call, sizes)
            case OutputArg():
                return Memory(sizes["num_logit_rows"] * 4 * self.program.vocab_size)
            case SamplingArg() | SampledArg():
                kind = "sampling" if isinstance(arg, SamplingArg) else "sampled"
                array = PLAN_ARRAYS[f"{kind}:{arg.name}"]
                low = {"token": -1, "top_ids": -1}.get(arg.name)
                return Memory(batch.nbytes(array), low, None if low is None else self.program.vocab_size - 1)
        raise ValueError(f"a launch asks for {arg}")

    def _blocks(self, layer: int) -> int:
        kv = self.program.kv
        return kv.blocks_needed(self.limits, self.batch.seqs)[kv.group_of(layer)]

    def _operand(self, operand: Operand, sizes: Sizes) -> Memory:
        item = ITEM_SIZE[operand.dtype]
        match operand:
            case BufferOperand():
                rows = sizes[f"num_{self.program.buffer(operand.name).rows}"]
                return Memory((rows * operand.stride - operand.offset) * item)
            case WeightOperand():
                return Memory(self.program.weights[operand.name].nbytes - operand.offset * item)
            case OutputOperand():
                return Memory(sizes["num_logit_rows"] * operand.stride * item)
        own = next((array for array in self.program.inputs if array.name == operand.name), None)
        if own is not None:
            return Memory(sizes["num_tokens"] * own.row_bytes - operand.offset * item)
        return self._array(operand.name, None, sizes)

    def _array(self, name: str, call: Call | None, sizes: Sizes) -> Memory:
        """An array of the batch, from the beginning of a layer's group."""
        batch, array = self.batch, PLAN_ARRAYS[name]
        kv, length = self.program.kv, self.limits.max_seq_len
        layer = call.layer if call is not None else -1
        group = kv.group_of(layer) if layer >= 0 else 0
        blocks = self._blocks(layer) if layer >= 0 else 1
        size = kv.groups[group].block_size if kv.groups else 1
        slots = blocks if kv.groups and kv.groups[group].holds_states else blocks * size
        bounds: dict[str, tuple[Number, Number]] = {
            "token_ids": (-batch.logit_rows, self.program.vocab_size - 1), "positions": (0, length - 1),
            "slot_mapping": (-1, slots - 1), "moves": (0, slots - 1),
            "seq_starts": (0, sizes["num_tokens"]), "context_lens": (0, length),
            "logit_rows": (0, sizes["num_tokens"] - 1), "block_tables": (0, blocks - 1),
        }  # fmt: skip
        nbytes: Number = batch.nbytes(array) - group * batch.group_bytes(array)
        dims = {"T": "num_tokens", "S": "num_seqs", "L": "num_logit_rows"}
        if array.shape[0] in dims and "G" not in array.shape:  # rows beyond the step's exist, but mean nothing
            whole = batch.shape(array)[0]
            nbytes = sizes[dims[str(array.shape[0])]] * (batch.nbytes(array) // whole)
        return Memory(nbytes, *bounds.get(name, (None, None)))


def _ranks(spec: LaunchSpec) -> list[int]:
    """The first and the last rank that may launch the spec."""
    return sorted({0, *(arg.value.rank for arg in spec.args if isinstance(arg.value, AreaArg) and arg.value.rank > 0)})


def _same(one: object, other: object) -> bool:
    """Whether two descriptions of memory are equal."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, Memory) and isinstance(other, Memory):
        return all(np.array_equal(getattr(one, n), getattr(other, n)) for n in ("nbytes", "low", "high"))  # type: ignore[arg-type]
    return False


def _one(values: np.ndarray) -> Number:
    """One integer if all values are equal, else the array."""
    return int(values[0]) if (values == values[0]).all() else values


def _places(grid: list[int]) -> np.ndarray:
    """The coordinates of the programs of a grid, int64 [programs, 3]: all, or some of each axis of a large grid."""
    axes = [np.arange(size, dtype=np.int64) for size in grid]
    if int(np.prod(grid)) > _EVERY:
        axes = [_spread(size) for size in grid]
    return np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, 3)


def _spread(size: int) -> np.ndarray:
    """Program numbers of an axis of `size` programs: all up to 24, else six at each end and twelve between."""
    if size <= 24:
        return np.arange(size, dtype=np.int64)
    ends = np.r_[np.arange(6), np.linspace(6, size - 7, 12).astype(np.int64), np.arange(size - 6, size)]
    return np.unique(ends)

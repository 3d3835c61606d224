"""Walks a launch plan: what each launch of a step is given, as places in memory that the executor resolves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..format.batch import PLAN_ARRAYS, BatchLimits
from ..format.elements import ITEM_SIZE
from ..format.kv import KVMemory
from ..format.operands import BufferOperand, Operand, WeightOperand
from ..format.plan import (
    COUNTERS,
    AreaArg,
    BatchArg,
    Call,
    CallArg,
    CountersArg,
    KVArg,
    Launch,
    LaunchArg,
    LaunchPlan,
    OperandArg,
    OutputArg,
    Phase,
    SamplingArg,
    ScratchArg,
    SizeArg,
    StepCountersArg,
)
from ..format.program import Program


@dataclass(frozen=True)
class LaunchPointer:
    """A pointer: byte `offset` into a memory `space`.

    Spaces: "arena", "kv", "scratch", "counters", "logits", "drafts", "weight" (of `name`), "area" (of the rank `name`,
    "-1" for this one), or the name of an array of `Launch`.
    """

    space: str
    offset: int = 0
    name: str = ""


@dataclass(frozen=True)
class LaunchArgument:
    """What a launch passes, symbolic in the batch: one of `SIZES` by its name, or, in a memory space, a pointer to byte
    `offset + per_token * num_tokens`; there, `name` is that of a weight."""

    name: str
    space: str = ""
    offset: int = 0
    per_token: int = 0

    def value(self, sizes: Mapping[str, int]) -> LaunchPointer | int:
        """The argument in a batch with these sizes: an integer, or where a pointer points."""
        if not self.space:
            return sizes[self.name]
        return LaunchPointer(self.space, self.offset + self.per_token * sizes["num_tokens"], self.name)


@dataclass(frozen=True)
class BoundLaunch:
    """A launch with its arguments as places and integers, and its grid as numbers; no dimension is 0."""

    launch: Launch
    args: list[LaunchPointer | int]
    grid: tuple[int, int, int]
    exchanged: int = 0  # float32 of a rank, where a communicator may do it


class Walker:
    """Binds the launches of a program's plan to the sizes of a step, and those of a KV layer to its place in the cache
    and to the arrays of its group. section: see `Section`; "" is the program. multiprocessors: of the device; runs that
    need more are launched one by one."""

    def __init__(
        self, program: Program, plan: LaunchPlan, cache: KVMemory, limits: BatchLimits, multiprocessors: int = 0
    ) -> None:
        self._program, self._multiprocessors = program, multiprocessors
        self._plan = plan
        self._buffers = {b.name: b for b in program.buffers}
        self._cache, self._limits = cache, limits

    def launches(self, phase: Phase, section: str = "") -> list[tuple[Launch, tuple[LaunchArgument, ...]]]:
        """All launches of a step in order. A section that runs behind a step has nothing before or after its own."""
        around = self._program.samples_in(section)
        before = [((), launch) for launch in phase.before if around]
        after = [((), launch) for launch in phase.after if around]
        steps = self._steps(phase, section)
        return [(launch, self.arguments(launch, *calls)) for calls, launch in (*before, *steps, *after)]

    def _steps(self, phase: Phase, section: str) -> Iterator[tuple[tuple[Call, ...], Launch]]:
        """The launches of a section's steps, each with its call, or with those of its run."""
        numbers, at = self._program.steps_of(section), 0
        runs = {run.first: run for run in phase.runs if run.multiprocessors <= self._multiprocessors}
        while at < len(numbers):
            first = numbers[at]
            run = runs.get(first)
            if run is not None and numbers[at : at + run.count] == list(range(first, first + run.count)):
                count, launches = run.count, run.launches
            else:
                count, launches = 1, phase.launches[self._plan.calls[first].kernel]
            yield from ((self._plan.calls[first : first + count], launch) for launch in launches)
            at += count

    def walk(self, phase: Phase, sizes: Mapping[str, int], section: str = "") -> Iterator[BoundLaunch]:
        """The launches of one step whose grid is not empty. sizes: the `SIZES` of the batch."""
        for launch, arguments in self.launches(phase, section):
            x, y, z = (dim.value(sizes) for dim in launch.grid)
            if x * y * z:
                count = launch.exchange.count.value(sizes) if launch.exchange else 0
                yield BoundLaunch(launch, [argument.value(sizes) for argument in arguments], (x, y, z), count)

    def arguments(self, launch: Launch, *calls: Call) -> tuple[LaunchArgument, ...]:
        """What a launch is given: one of a call, of a run's calls, or, without any, of what comes before or after."""
        return tuple(self._argument(arg, calls) for arg in launch.args)

    def _argument(self, arg: LaunchArg, calls: Sequence[Call]) -> LaunchArgument:
        call = calls[0] if calls else None
        match arg:
            case CallArg():
                return self._argument(arg.arg, calls[arg.call :])
            case StepCountersArg():
                return LaunchArgument("", "counters", 4 * COUNTERS * self._limits.seqs)
            case SizeArg():
                return LaunchArgument(arg.name)
            case ScratchArg():
                return LaunchArgument("", "scratch", arg.offset)
            case CountersArg():
                return LaunchArgument("", "counters")
            case AreaArg():
                return LaunchArgument(str(arg.rank), "area")
            case OperandArg() if call is not None:
                return self._operand(call.operands[arg.name])
            case KVArg() if call is not None:
                return LaunchArgument("", "kv", self._cache.layer_offset(call.layer))
            case BatchArg() if call is not None and (stride := self._limits.group_bytes(PLAN_ARRAYS[arg.name])):
                return LaunchArgument("", arg.name, stride * self._cache.layout.group_of(call.layer))
            case BatchArg() | OutputArg():
                return LaunchArgument("", arg.name)
            case OperandArg() | KVArg():
                raise ValueError(f"a launch outside the program's steps asks for {arg}")
        return LaunchArgument("", f"{'sampling' if isinstance(arg, SamplingArg) else 'sampled'}:{arg.name}")

    def _operand(self, operand: Operand) -> LaunchArgument:
        moved = operand.offset * ITEM_SIZE[operand.dtype]
        match operand:
            case BufferOperand():
                return LaunchArgument("", "arena", moved, per_token=self._buffers[operand.name].offset)
            case WeightOperand():
                return LaunchArgument(operand.name, "weight", moved)
        return LaunchArgument("", operand.name, moved)  # of the batch, or a result

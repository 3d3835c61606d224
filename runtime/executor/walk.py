"""Walks a launch plan: the arguments of each launch of a step, as symbolic pointers that the executor resolves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from ..format.batch import PLAN_ARRAYS, BatchLimits
from ..format.elements import ITEM_SIZE
from ..format.kv import KVMemory
from ..format.operands import BufferOperand, Operand, WeightOperand
from ..format.plan import (
    BY_ROWS,
    COUNTERS,
    EVEN_TOKENS,
    FIRST_OWN,
    OWN_TOKENS,
    REST_TOKENS,
    AreaArg,
    BatchArg,
    Call,
    CallArg,
    CountersArg,
    Exchange,
    Extent,
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
    Term,
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
    """An argument of a launch, symbolic in the step's sizes: one of `SIZES` by its name, or, if `space` is not "", a
    pointer to byte `offset + per_token * num_tokens + per_own * first_own` of that memory; `name` is then as in
    LaunchPointer."""

    name: str
    space: str = ""
    offset: int = 0
    per_token: int = 0
    per_own: int = 0

    def value(self, sizes: Mapping[str, int]) -> LaunchPointer | int:
        """The argument's value in a batch with these sizes: an integer or a pointer."""
        if not self.space:
            return sizes[self.name]
        at = self.offset + self.per_token * sizes["num_tokens"]
        if self.per_own:
            at += self.per_own * sizes[FIRST_OWN]
        return LaunchPointer(self.space, at, self.name)


@dataclass(frozen=True)
class BoundLaunch:
    """A launch with the values of its arguments and its grid, of which no dimension is 0. exchanged: a communicator's
    calls that may replace it."""

    launch: Launch
    args: list[LaunchPointer | int]
    grid: tuple[int, int, int]
    exchanged: tuple[Exchanged, ...] = ()


@dataclass(frozen=True)
class Exchanged:
    """One call of a communicator: "all_reduce", "all_gather", "reduce_scatter", or "reduce" and "broadcast" with the
    last rank as root. source, target: offsets, in float32 values, of what is read and written. count: float32 values of
    each rank."""

    op: str
    source: int
    target: int
    count: int


def exchanged(facts: Exchange, sizes: Mapping[str, int]) -> tuple[Exchanged, ...]:
    """The calls of an exchange in a step, without empty ones. sizes: those of a rank, see `Phase.rank_sizes`."""
    count = facts.count.value(sizes)
    if facts.op not in BY_ROWS:
        return (Exchanged(facts.op, 0, 0, count),) if count else ()
    tokens, first, even, rest = (sizes[name] * count for name in ("num_tokens", FIRST_OWN, EVEN_TOKENS, REST_TOKENS))
    if not even:
        return (Exchanged("all_reduce", 0, 0, tokens),) if facts.op == "reduce_scatter" and tokens else ()
    if facts.op == "reduce_scatter":
        calls = Exchanged("reduce_scatter", 0, first, even), Exchanged("reduce", tokens - rest, tokens - rest, rest)
    else:
        calls = Exchanged("all_gather", first, 0, even), Exchanged("broadcast", tokens - rest, tokens - rest, rest)
    return calls if rest else calls[:1]


class Walker:
    """Binds the launches of a program's plan to the sizes of a step, and those of a KV layer to its place in the cache
    and to the arrays of its group. Arguments named section: see `Section`; "" is the whole program. multiprocessors: of
    the device; runs that need more are launched one by one."""

    def __init__(
        self, program: Program, plan: LaunchPlan, cache: KVMemory, limits: BatchLimits, multiprocessors: int = 0
    ) -> None:
        self._program, self._multiprocessors = program, multiprocessors
        self._plan = plan
        self._buffers = {b.name: b for b in program.buffers}
        self._cache, self._limits = cache, limits

    def launches(self, phase: Phase, section: str = "") -> list[tuple[Launch, tuple[LaunchArgument, ...]]]:
        """All launches of a step in order. A section that runs after a step has only its own launches, none before or
        after them."""
        around = self._program.samples_in(section)
        before = [((), launch) for launch in phase.before if around]
        after = [((), launch) for launch in phase.after if around]
        steps = self._steps(phase, section)
        return [self._bound(calls, launch, phase) for calls, launch in (*before, *steps, *after)]

    def _bound(self, calls: Sequence[Call], launch: Launch, phase: Phase) -> tuple[Launch, tuple[LaunchArgument, ...]]:
        """A launch with its arguments: for a rank's own rows only, if its call is for own rows and the phase divides
        the rows."""
        if phase.own is None or not any(call.own for call in calls):
            return launch, self.arguments(launch, *calls)
        own = _of_own_rows(launch)
        return own, self.arguments(own, *calls, own=True)

    def _steps(self, phase: Phase, section: str) -> Iterator[tuple[tuple[Call, ...], Launch]]:
        """The launches of a section's steps, each with its call, or with all calls of its run."""
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
                calls = exchanged(launch.exchange, sizes) if launch.exchange else ()
                yield BoundLaunch(launch, [argument.value(sizes) for argument in arguments], (x, y, z), calls)

    def arguments(self, launch: Launch, *calls: Call, own: bool = False) -> tuple[LaunchArgument, ...]:
        """The arguments of a launch: of one call, of a run's calls, or (without calls) of a launch before or after the
        steps. own: whether operands begin at the rank's first own row."""
        return tuple(self._argument(arg, calls, own) for arg in launch.args)

    def _argument(self, arg: LaunchArg, calls: Sequence[Call], own: bool) -> LaunchArgument:
        call = calls[0] if calls else None
        match arg:
            case CallArg():
                return self._argument(arg.arg, calls[arg.call :], own)
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
                return self._operand(call.operands[arg.name], own)
            case KVArg() if call is not None:
                return LaunchArgument("", "kv", self._cache.layer_offset(call.layer))
            case BatchArg() if call is not None and (stride := self._limits.group_bytes(PLAN_ARRAYS[arg.name])):
                return LaunchArgument("", arg.name, stride * self._cache.layout.group_of(call.layer))
            case BatchArg() | OutputArg():
                return LaunchArgument("", arg.name)
            case OperandArg() | KVArg():
                raise ValueError(f"a launch outside the program's steps asks for {arg}")
        return LaunchArgument("", f"{'sampling' if isinstance(arg, SamplingArg) else 'sampled'}:{arg.name}")

    def _operand(self, operand: Operand, own: bool) -> LaunchArgument:
        moved = operand.offset * ITEM_SIZE[operand.dtype]
        row = operand.stride * ITEM_SIZE[operand.dtype] if own else 0
        match operand:
            case BufferOperand():
                return LaunchArgument("", "arena", moved, self._buffers[operand.name].offset, row)
            case WeightOperand():
                return LaunchArgument(operand.name, "weight", moved)
        return LaunchArgument("", operand.name, moved, per_own=row)  # an array of the batch, or a result


def _of_own_rows(launch: Launch) -> Launch:
    """The launch with its row count replaced by the number of a rank's own rows."""
    args = tuple(SizeArg(OWN_TOKENS) if arg == SizeArg("num_tokens") else arg for arg in launch.args)
    return msgspec.structs.replace(launch, args=args, grid=tuple(map(_of_own_extent, launch.grid)))


def _of_own_extent(found: Extent) -> Extent:
    terms = (Term(OWN_TOKENS, t.divide, t.times) if t.size == "num_tokens" else t for t in found.terms)
    return Extent(found.constant, tuple(terms))

"""Walks a launch plan: what each launch of a step is given, as places in memory that the executor resolves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ..format.batch import PLAN_ARRAYS, BatchLimits
from ..format.kv import KVMemory
from ..format.plan import SIZES, Launch, LaunchPlan, Phase
from ..format.program import DRAFTS, HEADS, ITEM_SIZE, Operand, Program, Step


@dataclass(frozen=True)
class Place:
    """A pointer: byte `offset` into a memory `space`.

    Spaces: "arena", "kv", "scratch", "logits", "drafts", "weight" (of `name`), or the name of an array of `Launch`.
    """

    space: str
    offset: int = 0
    name: str = ""


@dataclass(frozen=True)
class Argument:
    """What a launch passes, symbolic in the batch: one of `SIZES` by its name, or, in a memory space, a pointer to byte
    `offset + per_token * num_tokens`; there, `name` is that of a weight."""

    name: str
    space: str = ""
    offset: int = 0
    per_token: int = 0

    def value(self, sizes: Mapping[str, int]) -> Place | int:
        """What it is in a batch."""
        if not self.space:
            return sizes[self.name]
        return Place(self.space, self.offset + self.per_token * sizes["num_tokens"], self.name)


@dataclass(frozen=True)
class BoundLaunch:
    """A launch with its arguments as places and integers, and its grid as numbers; no dimension is 0."""

    launch: Launch
    args: list[Place | int]
    grid: tuple[int, int, int]


class Walker:
    """Binds the launches of a program's plan to the sizes of a step, and those of a KV layer to its place in the cache
    and to the arrays of its group. section: see `Section`; "" is the program."""

    def __init__(self, program: Program, plan: LaunchPlan, cache: KVMemory, limits: BatchLimits) -> None:
        self._program = program
        self._plan = plan
        self._buffers = {b.name: b for b in program.buffers}
        self._items = {name: ITEM_SIZE.get(w.format, 1) for name, w in program.weights.items()}
        self._cache, self._limits = cache, limits

    def launches(self, phase: Phase, section: str = "") -> list[tuple[Launch, tuple[Argument, ...]]]:
        """All launches of a step in order. Draft heads work on a step that has run: nothing comes before or after."""
        steps = [(step, launch) for step in self._program.steps_of(section) for launch in phase.launches[step.kernel]]
        before = [(None, launch) for launch in phase.before if section != HEADS]
        after = [(None, launch) for launch in phase.after if section != HEADS]
        return [(launch, self.arguments(launch, step)) for step, launch in (*before, *steps, *after)]

    def walk(self, phase: Phase, sizes: Mapping[str, int], section: str = "") -> Iterator[BoundLaunch]:
        """The launches of one step whose grid is not empty. sizes: the `SIZES` of the batch."""
        for launch, arguments in self.launches(phase, section):
            x, y, z = (dim.value(sizes) for dim in launch.grid)
            if x * y * z:
                yield BoundLaunch(launch, [argument.value(sizes) for argument in arguments], (x, y, z))

    def arguments(self, launch: Launch, step: Step | None) -> tuple[Argument, ...]:
        """What a launch of a step is given."""
        return tuple(self._argument(text, step) for text in launch.args)

    def _argument(self, text: str, step: Step | None) -> Argument:
        if text in SIZES:
            return Argument(text)
        kind, _, rest = text.partition(":")
        if kind == "scratch":
            return Argument("", "scratch", int(rest))
        if step is not None and kind in ("input", "output"):
            operands = step.inputs if kind == "input" else step.outputs
            return self._operand(operands[int(rest)])
        if step is not None and text == "kv":
            return Argument("", "kv", self._cache.layer_offset(step.layer))
        if step is not None and text in PLAN_ARRAYS and (stride := self._limits.group_bytes(PLAN_ARRAYS[text])):
            return Argument("", text, stride * self._cache.layout.group_of(step.layer))
        return Argument("", text)

    def _operand(self, operand: Operand) -> Argument:
        if operand.space == "buffer":
            buffer = self._buffers[operand.name]
            return Argument("", "arena", operand.offset * ITEM_SIZE[buffer.dtype], per_token=buffer.offset)
        if operand.space == "weight":
            return Argument(operand.name, "weight", operand.offset * self._items[operand.name])
        if operand.space == "input":
            return Argument("", operand.name, operand.offset * 4)
        return Argument("", DRAFTS if operand.name == DRAFTS else "logits", operand.offset * 4)

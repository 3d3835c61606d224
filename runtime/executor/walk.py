"""Walks a launch plan: what each launch of a step is given, as places in memory that the executor resolves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ..engine.plan import SIZES, Launch, LaunchPlan, Phase
from ..engine.program import ITEM_SIZE, Operand, Program, Step


@dataclass(frozen=True)
class Place:
    """A pointer: byte `offset` into a memory `space`.

    Spaces: "arena", "kv", "scratch", "logits", "weight" (of `name`), or the name of an array as `Launch` lists them.
    """

    space: str
    offset: int = 0
    name: str = ""


@dataclass(frozen=True)
class BoundLaunch:
    """A launch with its arguments as places and integers, and its grid as numbers; no dimension is 0."""

    launch: Launch
    args: list[Place | int]
    grid: tuple[int, int, int]


class Walker:
    """Binds the launches of a program's plan to the sizes of a step."""

    def __init__(self, program: Program, plan: LaunchPlan) -> None:
        self._program = program
        self._plan = plan
        self._buffers = {b.name: b for b in program.buffers}
        self._items = {name: ITEM_SIZE.get(w.format, 1) for name, w in program.weights.items()}
        layers = range(len(program.kv.layers))
        sizes = [program.kv.block_bytes(layer) for layer in layers]
        self._layer_offsets = [sum(sizes[:layer]) for layer in layers]

    def walk(self, phase: Phase, sizes: Mapping[str, int]) -> Iterator[BoundLaunch]:
        """All launches of one step in order. sizes: the `SIZES` of the batch."""
        steps = [(step, launch) for step in self._program.own_steps for launch in phase.launches[step.kernel]]
        before = [(None, launch) for launch in phase.before]
        after = [(None, launch) for launch in phase.after]
        for step, launch in (*before, *steps, *after):
            bound = self.bind(launch, sizes, step)
            if bound is not None:
                yield bound

    def bind(self, launch: Launch, sizes: Mapping[str, int], step: Step | None) -> BoundLaunch | None:
        """One launch, or None where its grid is empty."""
        x, y, z = (dim.value(sizes) for dim in launch.grid)
        if not x * y * z:
            return None
        return BoundLaunch(launch, [self._argument(text, step, sizes) for text in launch.args], (x, y, z))

    def _argument(self, text: str, step: Step | None, sizes: Mapping[str, int]) -> Place | int:
        if text in SIZES:
            return sizes[text]
        kind, _, rest = text.partition(":")
        if kind == "scratch":
            return Place("scratch", int(rest))
        if step is not None and kind in ("input", "output"):
            operands = step.inputs if kind == "input" else step.outputs
            return self._operand(operands[int(rest)], sizes)
        if step is not None and text == "kv":
            return Place("kv", self._layer_offsets[step.layer] * sizes["num_blocks"])
        return Place(text)

    def _operand(self, operand: Operand, sizes: Mapping[str, int]) -> Place:
        if operand.space == "buffer":
            buffer = self._buffers[operand.name]
            return Place("arena", buffer.offset * sizes["num_tokens"] + operand.offset * ITEM_SIZE[buffer.dtype])
        if operand.space == "weight":
            return Place("weight", operand.offset * self._items[operand.name], operand.name)
        if operand.space == "input":
            return Place(operand.name, operand.offset * 4)
        return Place("logits", operand.offset * 4)

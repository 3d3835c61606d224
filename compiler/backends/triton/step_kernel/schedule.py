"""In which order the programs of a step kernel take tiles, and what each waits for: known when it is compiled.

A stage is what one launch did: its tiles are the programs of that launch. The tiles of all stages stand in one list, in
the order of the program; of P programs, program p takes tiles p, p + P, p + 2 P .. of it. A stage has a counter of its
tiles that are done; one that touches what another stage wrote, or writes what another stage touched, waits for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from .....runtime.format.plan import STEP_COUNTERS


@dataclass(frozen=True)
class Span:
    """Bytes [begin, end) of a memory: "arena", "scratch", "counters", "kv" of a layer, or a weight's."""

    memory: str
    begin: int
    end: int

    def meets(self, other: Span) -> bool:
        """Whether they share a byte."""
        return self.memory == other.memory and self.begin < other.end and other.begin < self.end


@dataclass(frozen=True)
class Wait:
    """Until `counter` is at least `count`."""

    counter: int
    count: int


@dataclass(frozen=True)
class TileStage:
    """The tiles of one launch. early: what of `reads` is asked for before it waits. before: tiles of the stages before
    it. signal: the counter that each tile adds 1 to."""

    name: str
    tiles: int
    reads: frozenset[Span] = frozenset()
    writes: frozenset[Span] = frozenset()
    early: frozenset[Span] = frozenset()
    before: int = 0
    waits: tuple[Wait, ...] = ()
    signal: int = -1


def touches_after(later: TileStage, earlier: TileStage) -> bool:
    """Whether a stage must come behind another: it touches what that one writes, or writes what that one reads."""
    return _meet(later.writes, earlier.reads | earlier.writes) or _meet(later.reads, earlier.writes)


def _meet(some: Iterable[Span], others: Iterable[Span]) -> bool:
    return any(one.meets(other) for one in some for other in others)


def schedule(stages: Sequence[TileStage]) -> tuple[TileStage, ...]:
    """The stages with their counters and waits; what another wait has waited for is not waited for again."""
    made: list[TileStage] = []
    behind: list[set[int]] = []  # by stage: those that are done when it begins
    before = 0
    for number, stage in enumerate(stages):
        done, waits = set[int](), []
        for other in reversed(range(number)):
            if other not in done and touches_after(stage, made[other]):
                waits.append(Wait(other, made[other].tiles))
                done |= {other} | behind[other]
        made.append(replace(stage, before=before, waits=tuple(waits), signal=number))
        behind.append(done)
        before += stage.tiles
    return tuple(made)


def faults(stages: Sequence[TileStage]) -> Iterator[str]:
    """What is wrong with a schedule, in words; nothing of it is taken from how `schedule` makes one.

    No deadlock, however many programs there are: of all tiles that are not done, look at the first of the list. Its
    program has done all that it takes before, for these stand before it, too; what the tile waits for must be counted
    by tiles that stand before it, which are done. No race: two stages of which one writes what the other touches are
    ordered, if the later one waits until a counter has all that it ever gets, for then all tiles that count there are
    done, and all that these have waited for. Memory that is used again is a case of it.
    """
    total: dict[int, int] = {}
    for stage in stages:
        total[stage.signal] = total.get(stage.signal, 0) + stage.tiles
    counted: dict[int, int] = {}
    behind: list[set[int]] = []
    tiles = 0
    for number, stage in enumerate(stages):
        if stage.before != tiles:
            yield f"{stage.name} begins at tile {stage.before}, {tiles} tiles come before it"
        done = set[int]()
        for wait in stage.waits:
            if wait.count > counted.get(wait.counter, 0):
                found = counted.get(wait.counter, 0)
                yield f"{stage.name} waits for {wait.count} tiles at counter {wait.counter}, {found} come before it"
            if wait.count >= total.get(wait.counter, 0):
                done |= {n for n, other in enumerate(stages[:number]) if other.signal == wait.counter}
        behind.append(done.union(*(behind[other] for other in done)))
        for other, earlier in enumerate(stages[:number]):
            if other not in behind[number] and touches_after(stage, earlier):
                yield f"{stage.name} touches memory of {earlier.name} and does not wait for it"
            if _meet(stage.early, earlier.writes):
                yield f"{stage.name} asks for what {earlier.name} writes before it waits"
        if not 0 <= stage.signal < STEP_COUNTERS - 1:
            yield f"{stage.name} counts at {stage.signal}, there are {STEP_COUNTERS - 1} counters"
        counted[stage.signal] = counted.get(stage.signal, 0) + stage.tiles
        tiles += stage.tiles

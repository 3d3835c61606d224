"""Which launches of a decode step become one kernel: runs of calls that have a tile form, each kernel once in a run.

The layers of a model are runs of the same kernels, and share one object. A call that has no tile form separates two
runs and is launched as usual; kernels that launch no tile in most steps (moves of the cache) are launched before their
run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

from .....runtime.format.elements import ITEM_SIZE
from .....runtime.format.operands import BufferOperand, Operand, OutputOperand, WeightOperand
from .....runtime.format.plan import (
    COUNTERS,
    STEP_COUNTERS,
    AreaArg,
    BatchArg,
    CallArg,
    CountersArg,
    KVArg,
    OperandArg,
    OutputArg,
    ScratchArg,
    SizeArg,
    StepCountersArg,
)
from ....program.program import Program
from ....program.steps.base import Step
from ...errors import CodegenError
from ...render import render
from ..spec import ONE, Arg, LaunchSpec, Shape
from ..tiling.choice import Config
from ..tiling.whole import LAUNCHES
from .schedule import Span, TileStage, faults, schedule
from .stages import Stages
from .tiles import WEIGHTS, NoTileForm, TileForm, tile_form

_FIXED = {"num_tokens": 1, "num_seqs": 1}  # sizes of a step of one sequence


@dataclass(frozen=True)
class StepSource:
    """The parameters of the template: the stages with the functions and arguments of each."""

    stages: tuple[TileStage, ...]
    forms: tuple[TileForm, ...]
    grids: tuple[tuple[int, ...], ...]
    given: tuple[tuple[str, ...], ...]  # by stage: its arguments, by the kernel's names
    args: tuple[Arg, ...]

    entry = "step"

    @property
    def left(self) -> int:
        """The number of the counter after those of the stages."""
        return len(self.stages)

    @property
    def arguments(self) -> str:
        """The parameters of the kernel."""
        return ", ".join(arg.name for arg in self.args)

    @property
    def summary(self) -> str:
        """The kernel's description of itself."""
        return f"{sum(stage.tiles for stage in self.stages)} tiles: {', '.join(stage.name for stage in self.stages)}."

    def call(self, number: int) -> str:
        """The source line that computes a tile of a stage."""
        form, (x, y, _) = self.forms[number], self.grids[number]
        place = [f"tile % {x}", f"tile // {x} % {y}", f"tile // {x * y}"] if form.places else []
        return f"{form.entry}({', '.join([*self.given[number], *place])})"

    def ask(self, number: int, tile: str) -> str:
        """The source line that prefetches the first weights of a tile of a stage that waits; "" if the stage has
        none."""
        asks = self.forms[number].ask if self.stages[number].waits else ""
        return f"{asks}({WEIGHTS}_{number}, {tile}, 0, 0)" if asks else ""


@dataclass(frozen=True)
class PlannedRun:
    """Calls [first, first + count) of the program in one launch, after the launches in `ahead`. choice: the key of the
    choice of its tilings, and the answer: the least number of programs that a multiprocessor must hold."""

    first: int
    count: int
    ahead: tuple[LaunchSpec, ...]
    spec: LaunchSpec
    stages: tuple[TileStage, ...]
    choice: tuple[str, Config]


@dataclass
class _Growing:
    """A run under construction: launches with the number of their call in the run."""

    first: int
    kernels: list[str] = field(default_factory=list)
    tiled: list[tuple[int, LaunchSpec]] = field(default_factory=list)
    ahead: list[tuple[int, LaunchSpec]] = field(default_factory=list)


@dataclass(frozen=True)
class StepRuns:
    """The runs of a program in steps of one shape. specs: the launches of each kernel, none of them dependent; areas:
    bytes of each scratch area, by kernel; launched: gets the reason why a run stays separate launches, by run."""

    program: Program
    shape: Shape
    specs: Mapping[str, tuple[LaunchSpec, ...]]
    areas: Mapping[str, Mapping[str, int]]
    stages: Stages
    launched: dict[str, str] = field(default_factory=dict)

    @cached_property
    def refusals(self) -> dict[str, str]:
        """Why kernels have no tile form, by kernel."""
        reasons = {name: next(filter(None, map(self._refusal, specs)), "") for name, specs in self.specs.items()}
        for name, specs in self.specs.items():
            warps = sorted({spec.num_warps for spec in specs if not _is_move(spec)})
            if len(warps) > 1:
                reasons[name] = f"its launches have {' and '.join(map(str, warps))} warps"
        return {name: reason for name, reason in reasons.items() if reason}

    def _refusal(self, spec: LaunchSpec) -> str:
        if _is_move(spec):
            return ""
        if not spec.source or spec.exchange or any(isinstance(arg.value, AreaArg) for arg in spec.args):
            return "ranks meet in it"
        if any(term.size not in _FIXED for dim in spec.grid for term in dim.terms):
            return "how many programs it has is known in a step alone"
        try:
            _form(spec, 0)
        except NoTileForm as refusal:
            return str(refusal)
        return ""

    def find(self) -> tuple[PlannedRun, ...]:
        """All runs of at least two launches; empty unless steps have one sequence."""
        if not self.shape.decode or self.shape.max_tokens != 1:
            return ()
        made = (self._made(run) for run in self._open() if len(run.tiled) > 1)
        return tuple(run for run in made if run is not None)

    def _open(self) -> Iterator[_Growing]:
        """Runs of calls whose launches have the same number of warps."""
        run, ends = _Growing(0), {section.begin for section in self.program.sections}
        for number, step in enumerate(self.program.steps):
            specs = self.specs[step.kernel]
            tiled = [spec for spec in specs if not _is_move(spec)]
            warps = {spec.num_warps for _, spec in run.tiled} | {spec.num_warps for spec in tiled}
            full = len(run.tiled) + len(tiled) >= STEP_COUNTERS
            fits = step.kernel not in self.refusals
            if not fits or step.kernel in run.kernels or len(warps) > 1 or full or number in ends:
                yield run
                run = _Growing(number if fits else number + 1)
            if fits:
                place = len(run.kernels)
                run.kernels.append(step.kernel)
                run.tiled += [(place, spec) for spec in tiled]
                run.ahead += [(place, spec) for spec in specs if _is_move(spec)]
        yield run

    def _made(self, run: _Growing) -> PlannedRun | None:
        """The planned run; None if launches are faster by the model, or no step kernel passes the checks."""
        names = ", ".join(run.kernels)
        key = f"step kernel of {names}"
        waits = sum(bool(stage.waits) for stage in self._scheduled(run, run.tiled))
        whole = self.stages.whole(Counter(run.kernels[place] for place, _ in run.tiled), waits)
        choice = self.stages.choose(key, whole)
        tilings = whole.tilings(choice["resident"]) if choice != LAUNCHES else None
        if tilings is None:
            self.launched[names] = self.stages.why_launches(key, whole)
            return None
        made = self.stages.launches(run.kernels, tilings)
        tiled = [(n, spec) for n, name in enumerate(run.kernels) for spec in made[name] if not _is_move(spec)]
        stages = self._scheduled(run, tiled)
        spec = step_spec(tiled, stages)
        spec = replace(spec, max_registers=whole.registers(choice["resident"], spec.num_warps))
        ahead = tuple(_ahead(place, spec) for place, spec in run.ahead)
        return PlannedRun(run.first, len(run.kernels), ahead, spec, stages, (key, choice))

    def _scheduled(self, run: _Growing, tiled: Sequence[tuple[int, LaunchSpec]]) -> tuple[TileStage, ...]:
        steps = self.program.steps[run.first : run.first + len(run.kernels)]
        stages = schedule([self._stage(steps[place], spec) for place, spec in tiled])
        early = [self._stage(steps[place], spec) for place, spec in run.ahead]
        if found := [*faults(stages), *_too_early(early, stages)]:
            raise CodegenError(f"the step kernel from step {run.first} on: {found[0]}", "this is a gap in icc")
        return stages

    def _stage(self, step: Step, spec: LaunchSpec) -> TileStage:
        """The memory that a launch reads and writes; memory of arguments other than operands counts as written."""
        reads, writes = set[Span](), set[Span]()
        for arg in spec.args:
            if isinstance(arg.value, SizeArg | BatchArg):
                continue
            read = isinstance(arg.value, OperandArg) and arg.value.name in step.inputs
            (reads if read else writes).add(self._span(step, arg))
        tiles = 1
        for dim in spec.grid:
            tiles *= 0 if _is_move(spec) else dim.value(_FIXED)
        asks = tiles and _form(spec, 0).ask
        early = frozenset(self._span(step, arg) for arg in spec.args if asks and arg.name == WEIGHTS)
        return TileStage(step.kernel, tiles, frozenset(reads), frozenset(writes), early)

    def _span(self, step: Step, arg: Arg) -> Span:
        match arg.value:
            case OperandArg(name):
                return self._operand(step.operands[name])
            case KVArg():
                return Span(f"kv {step.layer}", 0, 1)
            case ScratchArg(name, offset):
                return Span("scratch", offset, offset + self.areas[step.kernel][name])
            case CountersArg():
                return Span("counters", 0, 4 * COUNTERS)
            case OutputArg(name):
                return Span(name, 0, 1)
        raise CodegenError(f"a step kernel cannot tell what {arg.value} touches", "this is a gap in icc")

    def _operand(self, operand: Operand) -> Span:
        match operand:
            case BufferOperand():
                buffer = self.program.buffer(operand.name)
                row = ITEM_SIZE[buffer.dtype]
                for size in buffer.shape:
                    row *= size
                return Span("arena", buffer.offset, buffer.offset + row)
            case WeightOperand() | OutputOperand():
                return Span(operand.name, 0, 1)
        return Span(f"input {operand.name}", 0, 1)


def _is_move(spec: LaunchSpec) -> bool:
    return any(term.size == "num_moves" for dim in spec.grid for term in dim.terms)


def _too_early(early: Sequence[TileStage], stages: Sequence[TileStage]) -> Iterator[str]:
    """The faults of launches that precede the run but touch memory of stages that came before them in the program."""
    for stage in early:
        at = next(n for n, other in enumerate(stages) if other.name == stage.name)
        for other in stages[:at]:
            if any(one.meets(two) for one in stage.writes | stage.reads for two in other.writes | other.reads):
                yield f"{stage.name} is launched before {other.name}, whose memory it touches"


@lru_cache(maxsize=1024)
def _form(spec: LaunchSpec, number: int) -> TileForm:
    return tile_form(spec, number, _grid(spec))


def _grid(spec: LaunchSpec) -> tuple[int, ...]:
    return tuple(dim.value(_FIXED) for dim in spec.grid)


def _ahead(place: int, spec: LaunchSpec) -> LaunchSpec:
    args = tuple(Arg(a.name, a.type, _of_call(place, a), a.aligned) for a in spec.args)
    return LaunchSpec(spec.source, spec.entry, args, spec.grid, spec.num_warps, spec.num_stages)


def _of_call(place: int, arg: Arg) -> CallArg | SizeArg | CountersArg:
    """An argument of a run's call: sizes and counters are the same for all."""
    if isinstance(arg.value, SizeArg | CountersArg):
        return arg.value
    assert not isinstance(arg.value, CallArg | StepCountersArg)
    return CallArg(place, arg.value)


def step_spec(tiled: Sequence[tuple[int, LaunchSpec]], stages: tuple[TileStage, ...]) -> LaunchSpec:
    """The kernel of a run; its grid is set when it is known how many programs fit."""
    args: dict[str, Arg] = {}
    given = []
    for number, (place, spec) in enumerate(tiled):
        names = []
        for arg in spec.args:
            value = _of_call(place, arg)
            name = f"{arg.name}_{number}" if isinstance(value, CallArg) else arg.name
            args[name] = Arg(name, arg.type, value, arg.aligned)
            names.append(name)
        given.append(tuple(names))
    args["step_ptr"] = Arg("step_ptr", "*i32", StepCountersArg())
    forms = tuple(_form(spec, number) for number, (_, spec) in enumerate(tiled))
    grids = tuple(_grid(spec) for _, spec in tiled)
    source = StepSource(stages, forms, grids, tuple(given), tuple(args.values()))
    warps, stage_count = tiled[0][1].num_warps, max(spec.num_stages for _, spec in tiled)
    text = render("triton/step.py.jinja", source)
    return LaunchSpec(text, source.entry, source.args, (ONE, ONE, ONE), warps, stage_count, resident=True)

"""`icc tune`: measures the tilings of an engine's kernels on this machine's GPU and writes the fastest of each.

It tunes the choices that kernels request from a `Tuner`. Their keys hold all that decides a tiling (op, sizes, types,
phase), so that a tuning file serves every model with equal layers.
"""

from __future__ import annotations

import datetime
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import msgspec

from ...runtime.batch.scheduled import ScheduledBatch, ScheduledSequence
from ...runtime.batch.tables import plain_tables
from ...runtime.executor.cuda.device import CudaDevice
from ...runtime.executor.player import Player
from ...runtime.format.load import Engine
from ...runtime.format.manifest import Limits
from ...runtime.format.plan import LaunchPlan
from ...runtime.kv.config import GroupConfig
from ..backends.triton.fallback import resource_fault
from ..backends.triton.objects.compile import Compiled, compile_specs
from ..backends.triton.plan import Planned, PlannedPhase, make_plan, phase_shapes, plan_program
from ..backends.triton.spec import LaunchSpec, Shape
from ..backends.triton.tiling.choice import Config, Tuner
from ..backends.triton.tiling.tuned import TuningFile
from ..errors import UsageError
from ..program.program import Program, program_of
from ..targets import Target, find_target

_SLOWER = 4.0  # candidates whose estimate is this many times the best one's are not measured
_MOST = 16  # candidates measured per choice
_ROUNDS = 7
_STEPS = 16  # launches of one round, on different layers, so that weights are read from memory and not from a cache


@dataclass(frozen=True)
class Recorder(Tuner):
    """A tuner that records the promising candidates of each request, and answers as its base class does."""

    asked: dict[str, list[Config]] = field(default_factory=dict)

    def pick(self, key: str, candidates: Sequence[Config], cost: Callable[[Config], float]) -> Config:
        best = super().pick(key, candidates, cost)
        limit = _SLOWER * min(map(cost, candidates))
        promising = sorted((c for c in candidates if cost(c) <= limit), key=cost)[:_MOST]
        self.asked[key] = promising
        return best


@dataclass(frozen=True)
class Choice:
    """One choice to decide: its key, the kernel and the phase that request it, and the candidates."""

    key: str
    kernel: str
    shape: Shape
    candidates: list[Config]


def find_choices(engine: Engine, target: Target) -> list[Choice]:
    """All choices of an engine's kernels that have several candidates, each once."""
    program, limits = program_of(engine), engine.manifest.limits
    known: dict[str, Choice] = {}
    for name in program.kernels:
        for shape in phase_shapes(limits):
            recorder = Recorder(target)
            plan_program(alone(program, name), limits, recorder, [shape])
            for key, candidates in recorder.asked.items():
                if len(candidates) > 1:
                    known.setdefault(key, Choice(key, name, shape, candidates))
    return list(known.values())


def tune(engine: Engine, output: Path, progress: Callable[[str, int, int], None]) -> TuningFile:
    """Measure all choices of an engine on its GPU. The tuning file at `output` is written again after each choice.
    UsageError if the engine is not for CUDA, or as `measure`."""
    if engine.manifest.gpu is None or engine.manifest.backend != "cuda":
        raise UsageError("only engines for NVIDIA GPUs can be tuned", "compile with a CUDA target first")
    target = find_target(engine.manifest.target)
    executor = Player(CudaDevice(engine))
    try:
        program, limits = program_of(engine), engine.manifest.limits
        choices, tilings = find_choices(engine, target), {}
        plans = {
            choice.key: [_plan(choice, config, program, limits, target) for config in choice.candidates]
            for choice in choices
        }
        executor.device.take_scratch(max((plan.scratch_bytes for many in plans.values() for plan in many), default=0))
        specs = {key: spec for many in plans.values() for plan in many for key, spec in plan.specs().items()}
        compiled = _compile_all(list(specs.values()), target, progress)
        device = executor.device.cuda.facts().name
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        found = TuningFile(target.name, device, today, version("triton"), tilings)
        for done, choice in enumerate(choices):
            progress(choice.key, done, len(choices))
            tilings[choice.key] = measure(choice, plans[choice.key], compiled, engine, executor, target)
            found = msgspec.structs.replace(found, tilings=dict(sorted(tilings.items())))
            output.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
    finally:
        executor.close()
    return found


def measure(
    choice: Choice,
    plans: Sequence[Planned],
    compiled: Mapping[str, Compiled],
    engine: Engine,
    executor: Player[CudaDevice],
    target: Target,
) -> Config:
    """The candidate with the least median time, among those that compile. UsageError if none does. plans: one per
    candidate."""
    times: list[tuple[float, int]] = []
    for i, plan in enumerate(plans):
        if all(key in compiled for key in plan.specs()):
            times.append((_time(choice, make_plan(plan, target, compiled), compiled, engine, executor), i))
    if not times:
        raise UsageError(f"no tiling of {choice.key} compiles for {target.name}", "this is a gap in icc")
    return choice.candidates[min(times)[1]]


def alone(program: Program, kernel: str) -> Program:
    """The program reduced to one kernel and the steps that launch it."""
    steps = tuple(step for step in program.steps if step.kernel == kernel)[:_STEPS]
    return msgspec.structs.replace(program, kernels={kernel: program.kernels[kernel]}, steps=steps)


def _plan(choice: Choice, config: Config, program: Program, limits: Limits, target: Target) -> Planned:
    planned = plan_program(alone(program, choice.kernel), limits, Tuner(target, {choice.key: config}), [choice.shape])
    phase = PlannedPhase(choice.shape, planned.phases[0].specs, (), ())
    return Planned(planned.calls, (phase,), planned.scratch_bytes)


def _compile_all(
    specs: list[LaunchSpec], target: Target, progress: Callable[[str, int, int], None]
) -> dict[str, Compiled]:
    """The compiled objects of all specs that compile and fit the GPU."""
    compiled = compile_specs(specs, target, progress, refused={})
    return {key: found for key, found in compiled.items() if not resource_fault(found, False, target)}


def _time(
    choice: Choice, plan: LaunchPlan, compiled: Mapping[str, Compiled], engine: Engine, executor: Player[CudaDevice]
) -> float:
    """Median seconds per layer of all launches of the kernel, over several layers."""
    cuda = executor.device.cuda
    functions = {
        name: cuda.function(compiled[name].binary, found.entry, found.shared_bytes)
        for name, found in plan.objects.items()
    }
    launches = plan.phases[0].launches[choice.kernel]
    sizes = executor.prepare(full_batch(choice.shape, engine.manifest.limits, executor.groups))

    ready = [
        executor.device.ready(functions[launch.object], plan.objects[launch.object], launch, call)
        for call in plan.calls
        for launch in launches
    ]

    def once() -> None:
        for launch in ready:
            launch.put(cuda, sizes)

    graph = cuda.capture(once)  # without it, slow launches of the host would be timed
    cuda.launch_graph(graph)
    found = statistics.median(cuda.seconds(lambda: cuda.launch_graph(graph)) for _ in range(_ROUNDS))
    cuda.forget_graph(graph)
    return found / len(plan.calls)


def full_batch(shape: Shape, limits: Limits, groups: Sequence[GroupConfig]) -> ScheduledBatch:
    """The largest step of a phase: decodes in the middle of their longest context, or one chunk of a prompt.

    All sequences share their blocks, because the results do not matter here.
    """
    if not shape.decode:
        tables = plain_tables(groups, shape.max_tokens)
        return ScheduledBatch((ScheduledSequence(0, (0,) * shape.max_tokens, 0, tables, 1),))
    start = min(limits.max_seq_len, 2048) // 2
    tables = plain_tables(groups, start + 1)
    return ScheduledBatch(tuple(ScheduledSequence(i, (0,), start, tables, 1) for i in range(shape.max_tokens)))

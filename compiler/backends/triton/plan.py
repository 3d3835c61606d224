"""From a program to its launch plan: every kernel in every phase that the scheduler can emit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from ....runtime.format.manifest import Limits
from ....runtime.format.plan import (
    Call,
    Extent,
    KernelObject,
    KernelRun,
    Launch,
    LaunchPlan,
    OwnRows,
    Phase,
    ScratchArg,
)
from ...program.own_rows import divides, own_row_steps, plan_own_rows
from ...program.program import Program
from ...program.steps.base import Step
from ...targets import Target
from .arrived import arrived
from .bounds.forms import Number
from .dependent import dependent
from .kernels.pending import PendingKernel
from .kernels.sample import SampleKernel
from .kernels.table import TRITON_KERNELS
from .objects.compile import Compiled, spec_key
from .objects.loops import loop_faults
from .spec import ONE, Arg, LaunchSpec, Shape, StepKernel, TritonKernel
from .step_kernel.runs import PlannedRun, StepRuns
from .step_kernel.stages import Stages
from .tiling.choice import Config, Tuner

_MIXED = (16, 64, 256, 512, 1024)
_TYPICAL = 128  # tokens that deterministic tilings are chosen for: so few that decodes are still bound by memory
_ALIGN = 256
BEFORE, AFTER = "", "sample"  # kernels that run before and after a program's steps


@dataclass(frozen=True)
class PlannedPhase:
    """The specs of every kernel in one phase, including the kernels before and after the program's steps.

    Scratch arguments are resolved to byte offsets. areas: bytes of each scratch area by kernel; made: the kernels that
    made the specs; picks: for each kernel with choices the first, its tiling, and the answer. runs: calls that may be
    launched as one kernel; untiled: why other kernels are in no run, by kernel or by the run that was not made. own:
    see `Phase`.
    """

    shape: Shape
    specs: Mapping[str, tuple[LaunchSpec, ...]]
    before: tuple[LaunchSpec, ...]
    after: tuple[LaunchSpec, ...]
    areas: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    made: Mapping[str, TritonKernel] = field(default_factory=dict)
    picks: Mapping[str, tuple[str, Config]] = field(default_factory=dict)
    runs: tuple[PlannedRun, ...] = ()
    untiled: Mapping[str, str] = field(default_factory=dict)
    own: OwnRows | None = None

    @property
    def kernels(self) -> dict[str, tuple[LaunchSpec, ...]]:
        """All launches by kernel, in order."""
        return {BEFORE: self.before, **self.specs, AFTER: self.after}

    def values(self, kernel: str, sizes: Mapping[str, Number]) -> dict[str, tuple[Number, Number]]:
        """As `TritonKernel.scratch_values` of the kernel of that name; empty for kernels that are not steps."""
        return self.made[kernel].scratch_values(sizes) if kernel in self.made else {}

    def all(self) -> dict[str, LaunchSpec]:
        """The specs of the objects that the phase launches, by name."""
        return {spec_key(spec): spec for specs in self.kernels.values() for spec in specs if spec.source}


@dataclass(frozen=True)
class Planned:
    """A plan whose objects are still to be compiled."""

    calls: tuple[Call, ...]
    phases: tuple[PlannedPhase, ...]
    scratch_bytes: int

    def specs(self) -> dict[str, LaunchSpec]:
        """Every object to compile, by name."""
        runs = [spec for phase in self.phases for run in phase.runs for spec in (*run.ahead, run.spec)]
        return {key: spec for phase in self.phases for key, spec in phase.all().items()} | {
            spec_key(spec): spec for spec in runs
        }


def phase_shapes(limits: Limits) -> list[Shape]:
    """Decode steps of 1, 2, 4, … sequences up to the largest batch, then mixed steps of a few sizes."""
    decodes = _powers(min(limits.max_batch_size, limits.max_step_tokens))
    mixed = [n for n in _MIXED if n < limits.max_step_tokens] + [limits.max_step_tokens]
    return [Shape(n, True) for n in decodes] + [Shape(n, False) for n in mixed]


def _powers(largest: int) -> list[int]:
    sizes = [1]
    while sizes[-1] < largest:
        sizes.append(min(2 * sizes[-1], largest))
    return sizes


def kernel_of(step: Step) -> StepKernel[Any]:
    """The Triton kernel that implements a step; CodegenError if there is none."""
    return TRITON_KERNELS.find(step)(step)


def plan_program(
    program: Program,
    limits: Limits,
    tuner: Tuner,
    shapes: Sequence[Shape] = (),
    deterministic: bool = False,
    step_kernel: bool = False,
) -> Planned:
    """All launches of all phases (or of `shapes`); raises CodegenError naming a kernel that some phase lacks.

    deterministic: all phases launch the same objects, in which the order of a row's sums does not depend on other rows.
    step_kernel: runs of launches in a step of one sequence may also be launched as one kernel (step_kernel/).
    """
    kernels: dict[str, TritonKernel] = {name: kernel_of(step) for name, step in program.kernel_steps.items()}
    around: dict[str, TritonKernel] = {BEFORE: PendingKernel()}
    if program.samples:
        around[AFTER] = SampleKernel(vocab=program.vocab_size, stride=program.vocab_size)
    scratch_bytes, phases, rows = 0, [], plan_own_rows(program)
    for shape in shapes or phase_shapes(limits):
        chosen = Shape(limits.max_step_tokens, False, _TYPICAL) if deterministic else shape

        picks: dict[str, tuple[str, Config]] = {}

        def plan_kernel(
            name: str, kernel: TritonKernel, picks: dict[str, tuple[str, Config]] = picks
        ) -> tuple[LaunchSpec, ...]:
            first = len(tuner.taken)
            specs = rendered(kernel, tuner)
            if len(tuner.taken) > first:
                picks[name] = tuner.taken[first]
            return specs

        def rendered(kernel: TritonKernel, tuner: Tuner, shape: Shape = chosen) -> tuple[LaunchSpec, ...]:
            nonlocal scratch_bytes
            offsets, total = _lay_out(kernel.scratch(shape, limits, tuner))
            scratch_bytes = max(scratch_bytes, total)
            specs = (_with_offsets(spec, offsets) for spec in kernel.launches(shape, limits, tuner))
            return tuple(arrived(spec, tuner.target) for spec in specs)

        def launched(specs: tuple[LaunchSpec, ...]) -> tuple[LaunchSpec, ...]:
            return tuple(map(dependent, specs)) if tuner.target.dependent_launch else specs

        plain = {name: plan_kernel(name, kernel) for name, kernel in kernels.items()}
        before = launched(plan_kernel(BEFORE, around[BEFORE]))
        after = launched(plan_kernel(AFTER, around[AFTER])) if AFTER in around else ()
        made = {**kernels, **around}
        areas = {name: kernel.scratch(chosen, limits, tuner) for name, kernel in made.items()}
        specs = {name: launched(found) for name, found in plain.items()}
        own = rows if rows and divides(rows.least, shape.max_tokens, shape.decode) else None
        phase = PlannedPhase(shape, specs, before, after, areas, made, picks, own=own)
        if step_kernel:
            stages = Stages(kernels, chosen, tuner, rendered)
            phase = _with_runs(phase, StepRuns(program, shape, plain, areas, stages), launched)
        phases.append(phase)
    by_rows = own_row_steps(program)
    calls = tuple(Call(s.kernel, s.operands, s.layer, n in by_rows) for n, s in enumerate(program.steps))
    return Planned(calls, tuple(phases), scratch_bytes)


def _with_runs(
    phase: PlannedPhase, found: StepRuns, launched: Callable[[tuple[LaunchSpec, ...]], tuple[LaunchSpec, ...]]
) -> PlannedPhase:
    runs = tuple(replace(run, ahead=launched(run.ahead), spec=launched((run.spec,))[0]) for run in found.find())
    untiled = found.launched | (found.refusals if runs else {})
    return replace(phase, runs=runs, untiled=untiled)


def _lay_out(areas: Mapping[str, int]) -> tuple[dict[str, int], int]:
    offsets, at = {}, 0
    for name, nbytes in areas.items():
        offsets[name] = at
        at += -(-nbytes // _ALIGN) * _ALIGN
    return offsets, at


def _with_offsets(spec: LaunchSpec, offsets: Mapping[str, int]) -> LaunchSpec:
    """The spec with the offsets of its scratch areas filled in."""

    def placed(arg: Arg) -> Arg:
        area = arg.value
        return replace(arg, value=ScratchArg(area.name, offsets[area.name])) if isinstance(area, ScratchArg) else arg

    return replace(spec, args=tuple(map(placed, spec.args)))


def make_plan(
    planned: Planned,
    target: Target,
    compiled: Mapping[str, Compiled],
    faults: Mapping[str, tuple[str, ...]] | None = None,
) -> LaunchPlan:
    """The launch plan with figures of its objects; objects that were not compiled have no resource figures. faults:
    faults other than those of loops, by object; None for none."""
    suffix = "cubin" if target.backend == "cuda" else "hsaco"
    objects = {}
    for key, spec in planned.specs().items():
        types = tuple(arg.type for arg in spec.args)
        file = f"kernels/{key}.{suffix}"
        plain = KernelObject(file, spec.entry, types, spec.num_warps, target.warp_size, 0, spec.dependent)
        objects[key] = _with_figures(plain, compiled[key], target, (faults or {}).get(key, ())) if compiled else plain
    phases = []
    for phase in planned.phases:
        launches = {name: _launches(specs) for name, specs in phase.specs.items()}
        around = _launches(phase.before), _launches(phase.after)
        runs = tuple(_run(run, target, compiled) for run in phase.runs)
        phases.append(Phase(phase.shape.max_tokens, phase.shape.decode, launches, *around, runs, phase.own))
    return LaunchPlan(objects, planned.calls, tuple(phases), planned.scratch_bytes)


def _launches(specs: tuple[LaunchSpec, ...]) -> tuple[Launch, ...]:
    return tuple(
        Launch(spec_key(s) if s.source else "", tuple(a.value for a in s.args), s.grid, s.exchange) for s in specs
    )


def _run(run: PlannedRun, target: Target, compiled: Mapping[str, Compiled]) -> KernelRun:
    """A run with as many programs as the target's multiprocessors hold; one per multiprocessor if the object was not
    compiled."""
    found = compiled.get(spec_key(run.spec))
    programs = target.multiprocessors * (resident(found, run.spec.num_warps, target) if found else 1)
    specs = (*run.ahead, replace(run.spec, grid=(Extent(programs), ONE, ONE)))
    return KernelRun(run.first, run.count, target.multiprocessors, _launches(specs))


def _with_figures(plain: KernelObject, compiled: Compiled, target: Target, faults: tuple[str, ...]) -> KernelObject:
    return msgspec.structs.replace(
        plain,
        entry=compiled.entry,
        shared_bytes=compiled.shared_bytes,
        registers=compiled.registers,
        spill_bytes=compiled.spill_bytes,
        occupancy=occupancy(compiled, plain.warps, target),
        faults=(*loop_faults(plain.entry, compiled.loops, target.level), *faults),
    )


def occupancy(compiled: Compiled, warps: int, target: Target) -> float:
    """Resident warps over the most that a multiprocessor holds, limited by registers, shared memory and warps."""
    return round(resident(compiled, warps, target) * warps / target.max_warps, 3)


def resident(compiled: Compiled, warps: int, target: Target) -> int:
    """Programs that a multiprocessor holds at once."""
    registers = -(-compiled.registers // 8) * 8 * target.warp_size * warps
    blocks = target.max_warps // warps
    if registers:
        blocks = min(blocks, target.registers // registers)
    if compiled.shared_bytes:
        held = (
            target.shared_memory_kib * 1024 + target.reserved_shared
        )  # bytes of a multiprocessor; one block may use all but the reserved ones
        blocks = min(blocks, held // (compiled.shared_bytes + target.reserved_shared))
    return blocks

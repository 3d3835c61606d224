"""Finds a plan whose objects no check refuses: the tiling of a refused object is excluded, and the next one is used."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ....runtime.format.manifest import Limits
from ...program.program import Program
from ...targets import Target
from ..errors import CodegenError, KernelRefused
from .bounds.addresses import IndexFault
from .objects.compile import Compiled, compile_specs, spec_key
from .objects.cubin import check_launch
from .plan import Planned, resident
from .reach import plan_faults
from .tiling.choice import RefusedTiling, Tuner

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Objects:
    """A plan and its objects by name. faults: by object, accesses that are not proved to lie in their buffers.
    launched: kernels that are not part of a step kernel, and why."""

    planned: Planned
    compiled: Mapping[str, Compiled]
    faults: Mapping[str, tuple[str, ...]]
    refused: tuple[RefusedTiling, ...]
    launched: tuple[str, ...] = ()


@dataclass
class TilingSearch:
    """One compile of a program for a target: it tries plans until no object is refused. plan: makes a plan from the
    answers of a tuner. reasons: by object, why it is refused in every plan."""

    program: Program
    limits: Limits
    target: Target
    plan: Callable[[Tuner], Planned]
    progress: Progress
    compiled: dict[str, Compiled] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    def run(self, tuner: Tuner) -> Objects:
        """The first plan that is not refused; CodegenError if a kernel has no tiling left."""
        while True:
            planned = self.plan(tuner)
            self._compile(planned)
            refused = refusals(planned, self.compiled, self.reasons, self.target, tuner.refused)
            if not refused:  # all objects exist, so their IR can be checked
                faults = check_addresses(self.program, self.limits, planned, self.compiled, self.reasons)
                refused = refusals(planned, self.compiled, self.reasons, self.target, tuner.refused)
                if not refused:
                    compiled = {key: self.compiled[key] for key in planned.specs()}
                    return Objects(planned, compiled, faults, tuner.refused, launched_lines(planned))
            tuner = replace(tuner, refused=(*tuner.refused, *refused))

    def _compile(self, planned: Planned) -> None:
        """Compile the objects that no earlier plan had."""
        specs = planned.specs()
        new = {key: spec for key, spec in specs.items() if key not in self.compiled and key not in self.reasons}
        if not new:
            return
        made = compile_specs(new.values(), self.target, self.progress, refused=self.reasons)
        self.compiled |= made
        for key, found in made.items() if self.target.backend == "cuda" else ():
            try:
                check_launch(key, found.binary, new[key], found.entry)
            except KernelRefused as refusal:
                self.reasons[key] = refusal.message


def refusals(
    planned: Planned,
    compiled: Mapping[str, Compiled],
    reasons: Mapping[str, str],
    target: Target,
    before: Sequence[RefusedTiling] = (),
) -> list[RefusedTiling]:
    """The tilings of a plan that led to objects that are refused: for `reasons`, for exceeding the target, or for
    spilling registers while decoding, unless that is one of `before`, which is back because nothing else is left.
    CodegenError if the kernel of such an object has only one form."""
    found: list[RefusedTiling] = []
    for phase in planned.phases:
        for kernel, specs in phase.kernels.items():
            keys = replace(phase, specs={kernel: specs}, before=(), after=()).all()
            for key in keys:
                reason = reasons.get(key) or resource_fault(compiled[key], phase.shape.decode, target)
                if not reason:
                    continue
                if kernel not in phase.picks:
                    raise CodegenError(f"kernel {key}: {reason}", "this is a gap in icc; please report it")
                hard = key in reasons or resource_fault(compiled[key], False, target)
                spills = 0 if hard else compiled[key].spill_bytes
                refusal = RefusedTiling(*phase.picks[kernel], f"{reason} ({key})", spills)
                known = [*found, *before] if spills else found
                if all((r.key, r.config) != (refusal.key, refusal.config) for r in known):
                    found.append(refusal)
    return found + run_refusals(planned, compiled, reasons, target)


def run_refusals(
    planned: Planned, compiled: Mapping[str, Compiled], reasons: Mapping[str, str], target: Target
) -> list[RefusedTiling]:
    """The choices of step kernels whose object is refused, or of which a multiprocessor holds fewer programs than the
    plan assumed."""
    found: dict[str, RefusedTiling] = {}
    for run in (run for phase in planned.phases for run in phase.runs):
        key, (choice, config) = spec_key(run.spec), run.choice
        fault = reasons.get(key) or resource_fault(compiled[key], True, target)
        if not fault and (held := resident(compiled[key], run.spec.num_warps, target)) < config["resident"]:
            fault = f"a multiprocessor of {target.name} holds {held} of its programs, not {config['resident']}"
        if fault:
            found[choice] = RefusedTiling(choice, config, f"{fault} ({key})")
    return list(found.values())


def launched_lines(planned: Planned) -> tuple[str, ...]:
    """A line for each kernel that cannot be part of a step kernel, and for each run of launches that was not merged."""
    found = (f"{kernel}: {reason}" for phase in planned.phases for kernel, reason in phase.untiled.items())
    return tuple(dict.fromkeys(found))


def resource_fault(compiled: Compiled, decode: bool, target: Target) -> str:
    """What an object needs that the target lacks, or that a decode kernel must not use; "" if there is no such
    fault."""
    limit = target.shared_memory_kib * 1024
    if compiled.shared_bytes > limit:
        return f"needs {compiled.shared_bytes} bytes of shared memory, {target.name} has {limit}"
    if decode and compiled.spill_bytes:
        return f"spills {compiled.spill_bytes} bytes per thread on {target.name}, which a decode kernel must not"
    return ""


def check_addresses(
    program: Program, limits: Limits, planned: Planned, compiled: Mapping[str, Compiled], reasons: dict[str, str]
) -> dict[str, tuple[str, ...]]:
    """By object, accesses that are not proved to lie in their buffers. An index that may overflow 32 bits is a reason
    to refuse the object and is added to `reasons`."""
    found = plan_faults(program, limits, planned, {key: made.ir for key, made in compiled.items()})
    for key, faults in found.items():
        for fault, phase in faults.items():
            if isinstance(fault, IndexFault):
                reasons[key] = f"{fault}, in {phase}; lower --max-step-tokens, --max-batch-size or --max-seq-len"
    return {key: tuple(f"not shown: {fault}" for fault in faults) for key, faults in found.items()}

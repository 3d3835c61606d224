"""The Triton backend: templates rendered per phase, compiled ahead of time to cubins or hsacos, and a launch plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from ....runtime.format.kv import KVLayer
from ....runtime.format.manifest import GpuFacts, Limits
from ...program.builder import WeightSource
from ...program.profile import Profile
from ...program.program import Program
from ...program.steps.base import Step
from ...targets import Target
from ...weights.formats.base import StorageFormat
from ..base import Built
from ..errors import CodegenError
from ..values import pack
from .bounds.addresses import IndexFault
from .kernels.caches import KV_ALIGN, TRITON_CACHES
from .kernels.table import TRITON_KERNELS
from .layouts.codes import CodeGroups
from .layouts.registry import LAYOUTS
from .objects.compile import Compiled, compile_specs
from .objects.cubin import check_launch
from .plan import Planned, make_plan, plan_program
from .reach import plan_faults
from .tiling.choice import Tuner
from .tiling.tuned import load_tuned


@dataclass(frozen=True)
class TritonBackend:
    """`weights` is the checkpoint's element type; products compute in it. deterministic: see `plan_program`."""

    target: Target
    weights: str
    deterministic: bool = False

    @property
    def profile(self) -> Profile:
        """Weights row-major, products in the checkpoint's type, float32 elsewhere."""
        return Profile(
            LAYOUTS.find, activation=self.weights, epilogues=True, by_alignment=True, joins=True, state_chunk=0,
            kv_align=KV_ALIGN, coding=self._coding,
        )  # fmt: skip

    def _coding(self, form: StorageFormat) -> str:
        layout = LAYOUTS.find(form, "product")
        return layout.rows8(self.target.level) if isinstance(layout, CodeGroups) else ""

    @property
    def kv_dtype(self) -> str:
        """The type of the products that read it."""
        return self.weights

    def pack(self, source: WeightSource) -> np.ndarray:
        """Rows as they are, or groups of codes with their scales."""
        return pack(source)

    def refusal(self, step: Step) -> str:
        """See `TRITON_KERNELS`."""
        return TRITON_KERNELS.refusal(step)

    def cache_refusal(self, form: str, layer: KVLayer) -> str:
        """See `TRITON_CACHES`."""
        return TRITON_CACHES.refusal(form, layer)

    def scratch_bytes(self, program: Program, limits: Limits) -> int:
        """Bytes of scratch memory that the phase needs that needs most."""
        return self._plan(program, limits).scratch_bytes

    def _plan(self, program: Program, limits: Limits) -> Planned:
        return plan_program(program, limits, Tuner(self.target, load_tuned(self.target)), (), self.deterministic)

    def build(
        self, program: Program, limits: Limits, kernels_dir: Path, progress: Callable[[str, int, int], None]
    ) -> Built:
        """Objects with their rendered sources beside them, and the plan that launches them."""
        planned = self._plan(program, limits)
        specs = planned.specs()
        compiled = compile_specs(specs.values(), self.target, progress)
        check_resources(planned, compiled, self.target)
        if self.target.backend == "cuda":
            for key, found in compiled.items():
                check_launch(key, found.binary, specs[key], found.entry)
        plan = make_plan(planned, self.target, compiled, check_addresses(program, limits, planned, compiled))
        kernels_dir.mkdir()
        for key, found in plan.objects.items():
            path = kernels_dir / Path(found.file).name
            path.write_bytes(compiled[key].binary)
            path.with_suffix(".py").write_text(specs[key].source)
        needed = max((c.driver_version for c in compiled.values()), default=0)
        return Built(
            msgspec.structs.replace(program, plan=plan), gpu=GpuFacts(self.target.arch, needed, self.deterministic)
        )


def check_addresses(
    program: Program, limits: Limits, planned: Planned, compiled: dict[str, Compiled]
) -> dict[str, tuple[str, ...]]:
    """By kernel, accesses that are not shown to lie in their buffers.

    CodegenError for an index that may leave 32 bits.
    """
    found = plan_faults(program, limits, planned, {key: made.ir for key, made in compiled.items()})
    for key, faults in found.items():
        for fault, phase in faults.items():
            if isinstance(fault, IndexFault):
                raise CodegenError(
                    f"kernel {key}: {fault}, in {phase}",
                    "lower --max-step-tokens, --max-batch-size or --max-seq-len, and please report it",
                )
    return {key: tuple(f"not shown: {fault}" for fault in faults) for key, faults in found.items()}


def check_resources(planned: Planned, compiled: dict[str, Compiled], target: Target) -> None:
    """CodegenError for a kernel that exceeds the target, or a decode kernel that spills registers."""
    limit = target.shared_memory_kib * 1024
    for key, found in compiled.items():
        if found.shared_bytes > limit:
            raise CodegenError(
                f"kernel {key} needs {found.shared_bytes} bytes of shared memory, {target.name} has {limit}",
                "this is a gap in icc; please report it",
            )
    for phase in planned.phases:
        for key in phase.all() if phase.shape.decode else ():
            if compiled[key].spill_bytes:
                raise CodegenError(
                    f"kernel {key} spills {compiled[key].spill_bytes} bytes per thread on {target.name}, which a "
                    "decode kernel must not",
                    "this is a gap in icc; please report it",
                )

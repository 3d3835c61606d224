"""The Triton backend: templates rendered per phase, compiled ahead of time to cubins or hsacos, and a launch plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
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
from ..values import pack
from .fallback import TilingSearch
from .kernels.caches import KV_ALIGN, TRITON_CACHES
from .kernels.table import TRITON_KERNELS
from .layouts.codes import CodeGroups
from .layouts.registry import LAYOUTS
from .plan import Planned, make_plan, plan_program
from .tiling.choice import Tuner
from .tiling.tuned import load_tuned


@dataclass(frozen=True)
class TritonBackend:
    """`weights` is the checkpoint's element type; products compute in it. deterministic, step_kernel: see
    `plan_program`."""

    target: Target
    weights: str
    deterministic: bool = False
    step_kernel: bool = False

    @property
    def profile(self) -> Profile:
        """Weights row-major, products in the checkpoint's type, float32 elsewhere."""
        return Profile(
            LAYOUTS.find, activation=self.weights, epilogues=True, adapts=True, by_alignment=True, joins=True,
            state_chunk=0, kv_align=KV_ALIGN, coding=self._coding,
        )  # fmt: skip

    def _coding(self, form: StorageFormat) -> str:
        layout = LAYOUTS.find(form, "product")
        return layout.rows8(self.target.level) if isinstance(layout, CodeGroups) else ""

    @property
    def kv_dtype(self) -> str:
        """The element type of the KV cache: the type of the products that read it."""
        return self.weights

    def pack(self, source: WeightSource) -> np.ndarray:
        """The bytes, uint8 [nbytes], of plain rows, or of groups of codes with their scales."""
        return pack(source)

    def refusal(self, step: Step) -> str:
        """See `TRITON_KERNELS`."""
        return TRITON_KERNELS.refusal(step)

    def cache_refusal(self, form: str, layer: KVLayer) -> str:
        """See `TRITON_CACHES`."""
        return TRITON_CACHES.refusal(form, layer)

    def scratch_bytes(self, program: Program, limits: Limits) -> int:
        """Bytes of scratch memory of the phase that needs the most."""
        return self._plan(program, limits, self._tuner()).scratch_bytes

    def _plan(self, program: Program, limits: Limits, tuner: Tuner) -> Planned:
        return plan_program(program, limits, tuner, (), self.deterministic, self.step_kernel)

    def _tuner(self) -> Tuner:
        return Tuner(self.target, load_tuned(self.target))

    def build(
        self, program: Program, limits: Limits, kernels_dir: Path, progress: Callable[[str, int, int], None]
    ) -> Built:
        """GPU objects with their rendered sources beside them, and the plan that launches them."""
        made = TilingSearch(program, limits, self.target, partial(self._plan, program, limits), progress)
        objects = made.run(self._tuner())
        specs, compiled = objects.planned.specs(), objects.compiled
        plan = make_plan(objects.planned, self.target, compiled, objects.faults)
        kernels_dir.mkdir()
        for key, found in plan.objects.items():
            path = kernels_dir / Path(found.file).name
            path.write_bytes(compiled[key].binary)
            path.with_suffix(".py").write_text(specs[key].source)
        needed = max((c.driver_version for c in compiled.values()), default=0)
        return Built(
            msgspec.structs.replace(program, plan=plan),
            gpu=GpuFacts(self.target.arch, needed, self.deterministic),
            refused=tuple(map(str, objects.refused)),
            launched=objects.launched,
        )

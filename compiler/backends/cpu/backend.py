"""The CPU backend: C++ rendered per ISA level, compiled to one library each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ....runtime.format.kv import KVLayer
from ....runtime.format.manifest import Limits
from ...errors import UsageError
from ...program.builder import WeightSource
from ...program.profile import Profile
from ...program.program import Program
from ...program.steps.base import Step
from ...targets import Target
from ..base import Built
from ..values import pack
from .build import build_libraries
from .isa import find_isas, host_isas
from .kernels.caches import CPU_CACHES
from .kernels.table import CPU_KERNELS
from .layouts.registry import LAYOUTS

SCREENED_BYTES = 16 << 20  # bytes of codes; a smaller head may stay in the caches
CPU_PROFILE = Profile(LAYOUTS.find, adds=True, adapts=True, screened_bytes=SCREENED_BYTES)


@dataclass(frozen=True)
class CpuBackend:
    """`weights` is the checkpoint's element type. isa, os: ISA levels and operating systems to compile for instead of
    the target's, see `find_isas`."""

    target: Target
    weights: str
    isa: str | None = None
    os: str | None = None

    @property
    def profile(self) -> Profile:
        """float32 activations, tiles of weights, int8 rows for quantized products."""
        return CPU_PROFILE

    @property
    def kv_dtype(self) -> str:
        """float16 keeps more of a key than bfloat16, and CPUs convert it as fast."""
        return "f32" if self.weights == "f32" else "f16"

    def pack(self, source: WeightSource) -> np.ndarray:
        """The bytes, uint8 [nbytes], of tiles of 16 rows, or of plain rows."""
        return pack(source)

    def refusal(self, step: Step) -> str:
        """See `CPU_KERNELS`."""
        return CPU_KERNELS.refusal(step)

    def cache_refusal(self, form: str, layer: KVLayer) -> str:
        """See `CPU_CACHES`."""
        return CPU_CACHES.refusal(form, layer)

    def scratch_bytes(self, program: Program, limits: Limits) -> int:
        """Zero: each thread of a library allocates its own scratch memory."""
        return 0

    def build(
        self, program: Program, limits: Limits, kernels_dir: Path, progress: Callable[[str, int, int], None]
    ) -> Built:
        """One library per ISA level, best first; `native` builds only the best level of this machine. UsageError if
        this machine has none of the levels."""
        isas = host_isas()[:1] if self.target.is_here else find_isas(self.target.arch, self.isa, self.os)
        if not isas:
            raise UsageError("this machine has none of the instruction sets that icc knows", "use --target cpu")
        return Built(program, tuple(build_libraries(program, kernels_dir, isas, progress=progress)))

"""The backends: each says how it stores values, packs weights, and turns a program into kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from ...runtime.format.kv import KVLayer
from ...runtime.format.manifest import GpuFacts, Library, Limits
from ..program.builder import WeightSource
from ..program.profile import Profile
from ..program.program import Program
from ..program.steps.base import Step

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Built:
    """Compiled kernels: the program (with a launch plan on a GPU), the CPU libraries, and the features that a GPU
    needs.

    refused: tilings of GPU kernels that a check refused and that other tilings replaced, each with the reason.
    launched: kernels that --step-kernel left as launches of their own, each with the reason.
    """

    program: Program
    libraries: tuple[Library, ...] = ()
    gpu: GpuFacts | None = None
    refused: tuple[str, ...] = ()
    launched: tuple[str, ...] = ()


class Backend(Protocol):
    """Turns programs into kernels for one kind of target."""

    @property
    def profile(self) -> Profile:
        """How values are stored."""
        ...

    @property
    def kv_dtype(self) -> str:
        """The dtype of the KV cache if the user names none: 16 bits for 16-bit weights, else float32."""
        ...

    def pack(self, source: WeightSource) -> np.ndarray:
        """The packed bytes of one weight, uint8 [nbytes]."""
        ...

    def refusal(self, step: Step) -> str:
        """Why there is no kernel for a step; "" if there is one."""
        ...

    def cache_refusal(self, form: str, layer: KVLayer) -> str:
        """Why there are no kernels for a layer that is cached in a KV format; "" if there are."""
        ...

    def scratch_bytes(self, program: Program, limits: Limits) -> int:
        """Bytes of scratch memory that kernels share in addition to the arena, known before anything is built; raises
        CodegenError."""
        ...

    def build(self, program: Program, limits: Limits, kernels_dir: Path, progress: Progress) -> Built:
        """Render and compile every kernel into `kernels_dir`; raises CodegenError or ToolchainError."""
        ...

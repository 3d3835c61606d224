"""AVX-VNNI on a machine that may not have it: the level's own kernels, with other instructions for its two."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from icc.compiler.backends.cpu.isa import AVX2, AVX512VNNI, AVXVNNI, Isa
from icc.runtime.format.isa import cpu_flags

HERE = Path(__file__).parent


def _instead(header: str, level: Isa) -> Isa:
    """The level's kernels, compiled for another one after a header of the tests."""
    return replace(AVXVNNI, flags=(*level.flags, "-include", str(HERE / header)), cpu_flags=level.cpu_flags)


MODEL = _instead("vnni_model.h", AVX2)
TWIN = _instead("vnni_twin.h", AVX512VNNI)  # the same instructions as AVX-512 encodes them


def runnable_avxvnni() -> Isa:
    """The level where the CPU has it, else its twin where it has that, else with a model of the instructions in C."""
    flags = cpu_flags()
    return next(isa for isa in (AVXVNNI, TWIN, MODEL) if flags.issuperset(isa.cpu_flags))

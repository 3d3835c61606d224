"""AVX-VNNI and AMX on a machine that may not have them: a level's kernels, with substitutes for its instructions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from icc.compiler.backends.cpu.isa import AMX, AVX2, AVX512VNNI, AVXVNNI, Isa
from icc.runtime.format.isa import can_run, cpu_flags

HERE = Path(__file__).parent


def _instead(own: Isa, level: Isa, *headers: str) -> Isa:
    """The kernels of level `own`, compiled for `level` with headers of the tests included first."""
    included = [flag for header in headers for flag in ("-include", str(HERE / header))]
    return replace(own, flags=(*level.flags, *included), cpu_flags=level.cpu_flags)


MODEL = _instead(AVXVNNI, AVX2, "vnni_model.h")
TWIN = _instead(AVXVNNI, AVX512VNNI, "vnni_twin.h")  # the same instructions as AVX-512 encodes them
AMX_MODEL = _instead(AMX, AVX512VNNI, "amx_model.h")
AMX_MODELS = replace(  # models of tiles and of the vector instructions
    _instead(AMX, AVX2, "amx_model.h", "vnni_model.h"), headers=AMX.headers + AVXVNNI.headers
)


def runnable_avxvnni() -> Isa:
    """The level itself if the CPU has it, else its twin if the CPU has that, else with a model of its instructions in
    C."""
    flags = cpu_flags()
    return next(isa for isa in (AVXVNNI, TWIN, MODEL) if flags.issuperset(isa.cpu_flags))


def runnable_amx() -> Isa:
    """The level itself if CPU and system have it, else with a model of its instructions in C, over AVX-512 or AVX2."""
    flags = cpu_flags()
    return next(isa for isa in (AMX, AMX_MODEL, AMX_MODELS) if can_run(isa.cpu_flags, flags))

"""From a program to compiled kernels, per backend."""

from __future__ import annotations

from pathlib import Path

from ...runtime.engine.manifest import Library
from ...runtime.engine.program import Program
from ..errors import UsageError
from ..targets import Target
from .cpu.build import build_libraries
from .cpu.isa import ALL, Isa


def build_kernels(program: Program, kernels_dir: Path, target: Target) -> list[Library]:
    """Render and compile every kernel of the program for the target; best library first."""
    isas = [isa for isa in ALL if target.name != "native" or _runs_here(isa)]
    if not isas:
        raise UsageError("this machine has none of the instruction sets that icc knows", "use --target cpu")
    chosen = isas if target.name == "cpu" else [best(isas)]
    libraries = build_libraries(program, kernels_dir, chosen)
    return sorted(libraries, key=lambda lib: -len(lib.cpu_flags))


def best(isas: list[Isa]) -> Isa:
    """The level that needs the most of the CPU."""
    return max(isas, key=lambda isa: len(isa.cpu_flags))


def _runs_here(isa: Isa) -> bool:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return set(isa.cpu_flags) <= set(line.split(":")[1].split())
    return False

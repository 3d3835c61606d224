"""Which of the engine's libraries this machine can run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..errors import MissingIsaError, UsageError
from .manifest import Library


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """The CPU's feature flags as the kernel names them; empty if the file cannot be read."""
    try:
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("flags"):
                return frozenset(line.partition(":")[2].split())
    except OSError:
        pass
    return frozenset()


def select_library(libraries: Sequence[Library], flags: frozenset[str], isa: str | None = None) -> Library:
    """The best library whose flags are all there, or the one named by `isa`; they go from best to most portable.

    UsageError if the engine has no such level; MissingIsaError if the machine cannot run it (or any).
    """
    candidates = libraries
    if isa is not None:
        candidates = [library for library in candidates if library.isa == isa]
        if not candidates:
            known = ", ".join(library.isa for library in libraries)
            raise UsageError(f"the engine has no library for isa {isa!r}", f"it has: {known}")
    for library in candidates:
        if flags.issuperset(library.cpu_flags):
            return library
    if not candidates:
        raise MissingIsaError(
            "the engine has no kernel library", "compile the model for a target that this machine has"
        )
    least = candidates[-1]  # the most portable one
    present = [flag for flag in least.cpu_flags if flag in flags]
    missing = [flag for flag in least.cpu_flags if flag not in flags]
    raise MissingIsaError(
        f"this machine cannot run the engine: need {' '.join(least.cpu_flags)} (level {least.isa}), "
        f"have {' '.join(present) or 'none of them'}, missing {' '.join(missing)}",
        "run it on another machine, or compile the model for a target that this machine has",
    )

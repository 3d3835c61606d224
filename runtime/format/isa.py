"""Which of the engine's libraries this machine can run."""

from __future__ import annotations

import ctypes
import functools
import struct
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from ..errors import MissingIsaError, UsageError
from ..system import MACOS, SYSTEMS, WINDOWS, machine, system
from .cpuid import macos_flags, windows_flags
from .manifest import Library

TILES = "amx_tile"  # the flag of AMX

# arm64's flags come from the kernel (AT_HWCAP, AT_HWCAP2 and their bits, asm/hwcap.h): there an emulator names the CPU
# that it emulates, while /proc/cpuinfo describes its host.
_HWCAPS = {"atomics": (16, 8), "asimddp": (16, 20), "i8mm": (26, 13)}


def cpu_flags(
    cpuinfo: Path = Path("/proc/cpuinfo"), auxv: Path = Path("/proc/self/auxv"), machine: str = machine()
) -> frozenset[str]:
    """The CPU's feature flags as Linux names them, whatever the system; empty if it does not tell."""
    if system() == MACOS:
        return macos_flags(machine)
    if system() == WINDOWS:
        return windows_flags(machine)
    try:
        if machine in ("arm64", "aarch64"):
            found = dict(struct.iter_unpack("<QQ", auxv.read_bytes()))
            return frozenset(name for name, (key, bit) in _HWCAPS.items() if found.get(key, 0) >> bit & 1)
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("flags"):
                return frozenset(line.partition(":")[2].split())
    except OSError:
        pass
    return frozenset()


@functools.cache
def _tiles_allowed() -> bool:
    """Whether the system lets this process use AMX's tiles. Linux wants to be asked, since 5.16, before their first
    use; the threads that are there then, later ones and forked processes may use them, too.

    arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA), see Linux's Documentation/arch/x86/xstate.rst.
    """
    return sys.platform == "linux" and machine() == "x86-64" and ctypes.CDLL(None).syscall(158, 0x1023, 18) == 0


def can_run(needs: Collection[str], flags: frozenset[str]) -> bool:
    """Whether a CPU with such flags runs a library that needs some; for tiles this process asks the system, once."""
    return flags.issuperset(needs) and (TILES not in needs or _tiles_allowed())


def runs_here(library: Library, flags: frozenset[str]) -> bool:
    """Whether it is for this system and a CPU with such flags."""
    return library.system == system() and can_run(library.cpu_flags, flags)


def select_library(libraries: Sequence[Library], flags: frozenset[str], isa: str | None = None) -> Library:
    """The best library for this system whose flags are all there, or the one named by `isa` if that is not None; they
    go from best to most portable.

    UsageError if the engine has no such level; MissingIsaError if the machine cannot run it (or any).
    """
    candidates = [library for library in libraries if library.system == system()]
    if libraries and not candidates:
        known = ", ".join(dict.fromkeys(library.system for library in libraries))
        raise MissingIsaError(
            f"this machine cannot run the engine: it has {system()}, the engine's kernels are for {known}",
            f"compile the model again with --os {system()}" if system() in SYSTEMS else f"run it on {known}",
        )
    libraries = candidates
    if isa is not None:
        candidates = [library for library in candidates if library.isa == isa]
        if not candidates:
            known = ", ".join(library.isa for library in libraries)
            raise UsageError(f"the engine has no library for isa {isa!r}", f"it has: {known}")
    for library in candidates:
        if can_run(library.cpu_flags, flags):
            return library
    if not candidates:
        raise MissingIsaError(
            "the engine has no kernel library", "compile the model for a target that this machine has"
        )
    least = _nearest(candidates, flags)[-1]  # the most portable one
    if flags.issuperset(least.cpu_flags):
        raise MissingIsaError(
            f"level {least.isa} needs tile data of AMX, which the system refuses this process", "use another level"
        )
    present = [flag for flag in least.cpu_flags if flag in flags]
    missing = [flag for flag in least.cpu_flags if flag not in flags]
    raise MissingIsaError(
        f"this machine cannot run the engine: need {' '.join(least.cpu_flags)} (level {least.isa}), "
        f"have {' '.join(present) or 'none of them'}, missing {' '.join(missing)}",
        "run it on another machine, or compile the model for a target that this machine has",
    )


def _nearest(libraries: Sequence[Library], flags: frozenset[str]) -> Sequence[Library]:
    """The libraries of this machine's kind, of an engine that has some for several; all where there are none."""
    some = [library for library in libraries if not flags.isdisjoint(library.cpu_flags)]
    arm64 = machine() == "arm64"
    return some or [one for one in libraries if _HWCAPS.keys().isdisjoint(one.cpu_flags) != arm64] or libraries

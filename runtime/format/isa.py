"""Selects the engine's kernel library that this machine can run."""

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

TILES = "amx_tile"  # the CPU flag of AMX

# arm64's flags come from the kernel (AT_HWCAP, AT_HWCAP2 and their bits, asm/hwcap.h): under emulation these describe
# the emulated CPU, while /proc/cpuinfo describes the host.
_HWCAPS = {"atomics": (16, 8), "asimddp": (16, 20), "i8mm": (26, 13)}


def cpu_flags(
    cpuinfo: Path = Path("/proc/cpuinfo"), auxv: Path = Path("/proc/self/auxv"), machine: str = machine()
) -> frozenset[str]:
    """The CPU's feature flags under Linux's names, on any system; empty if the system does not report them."""
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
    """Whether the system lets this process use AMX's tiles. Since 5.16, Linux requires a request before their first
    use; it then holds for existing and later threads and for forked processes.

    arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA), see Linux's Documentation/arch/x86/xstate.rst.
    """
    return sys.platform == "linux" and machine() == "x86-64" and ctypes.CDLL(None).syscall(158, 0x1023, 18) == 0


def can_run(needs: Collection[str], flags: frozenset[str]) -> bool:
    """Whether a CPU with these flags runs a library with these needs; if it needs tiles, the system is asked once."""
    return flags.issuperset(needs) and (TILES not in needs or _tiles_allowed())


def runs_here(library: Library, flags: frozenset[str]) -> bool:
    """Whether a library is for this system and runs on a CPU with these flags."""
    return library.system == system() and can_run(library.cpu_flags, flags)


def select_library(libraries: Sequence[Library], flags: frozenset[str], isa: str | None = None) -> Library:
    """The first library for this system that runs on a CPU with these flags. libraries: from best to most portable.
    isa: use this level; None: any.

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
    """The libraries for this machine's architecture; all libraries if there are none."""
    some = [library for library in libraries if not flags.isdisjoint(library.cpu_flags)]
    arm64 = machine() == "arm64"
    return some or [one for one in libraries if _HWCAPS.keys().isdisjoint(one.cpu_flags) != arm64] or libraries

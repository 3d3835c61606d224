"""Checks the assembly of AMD kernels: stores must have completed before a program signals them to others."""

from __future__ import annotations

import re

from ...errors import KernelRefused

_MEMORY = r"(?:global|buffer|flat)_"
_STORE = re.compile(rf"{_MEMORY}store")
_ATOMIC = re.compile(rf"{_MEMORY}atomic")
# by generation: stores are counted with loads, separately, or under a name of their own
_WAITED = re.compile(
    r"s_waitcnt\b.*\bvmcnt\(0\)|s_waitcnt_vscnt\s+null,\s*0x0\b|s_wait_(?:loadcnt_)?storecnt\w*\s+0x0\b"
)


def unfinished_stores(assembly: str) -> tuple[int, ...]:
    """Lines, from 1, of barriers with a preceding store that is not waited for and a following atomic that signals it.

    The check assumes that instructions run in the order of the text, masked stores included.
    """
    found: list[int] = []
    stored, barrier = False, 0
    for number, line in enumerate(assembly.splitlines(), 1):
        text = line.split(";")[0].strip()
        if _STORE.match(text):
            stored = True
        elif _WAITED.match(text):
            stored = False
        elif text.startswith("s_barrier") and not text.startswith("s_barrier_wait"):
            barrier = number if stored else 0
        elif _ATOMIC.match(text) and barrier:
            found.append(barrier)
            barrier = 0
    return tuple(found)


def check_stores(assembly: str) -> None:
    """Raise KernelRefused for a kernel that signals stores which may not have completed."""
    if lines := unfinished_stores(assembly):
        raise KernelRefused(
            f"{len(lines)} barriers do not wait for what was stored before others are told of it",
            "this version of Triton orders instructions in another way; please report it",
        )

"""The heap of a compile: weights of 100 MiB are allocated and freed, and fresh pages cost more than the computation.

Compiling the Llama-3.2-1B shape with rtn4 took 58 s, of which 47 s of CPU time in the kernel; with this 42 s, and 37 to
39 s with a top pad as well, which took 2 % more memory at the peak (benchmarks/log/2026-11-24.md).
"""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # from malloc.h
_MAPPED = 256 << 20  # bytes; larger blocks are returned to the system at once
_KEPT = 512 << 20  # bytes that may be free


def keep_freed_memory() -> None:
    """Let this process reuse the memory that it has freed, if its C library has a setting for it (glibc has)."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _MAPPED)
        mallopt(_TRIM_THRESHOLD, _KEPT)

"""Memory that faults when it is touched, in a process with AddressSanitizer; elsewhere nothing happens."""

from __future__ import annotations

import ctypes

_process = ctypes.CDLL(None)
LOADED = hasattr(_process, "__asan_poison_memory_region")


def fence(address: int, nbytes: int) -> None:
    """Any access to these bytes by instrumented code ends the process with a report."""
    if LOADED:
        _process.__asan_poison_memory_region(ctypes.c_void_p(address), ctypes.c_size_t(nbytes))


def unfence(address: int, nbytes: int) -> None:
    """The bytes may be touched again."""
    if LOADED:
        _process.__asan_unpoison_memory_region(ctypes.c_void_p(address), ctypes.c_size_t(nbytes))

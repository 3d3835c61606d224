"""Functions of the operating system in which Linux, macOS and Windows differ."""

from __future__ import annotations

import mmap
import os
import sys
from typing import Any

LINUX, MACOS, WINDOWS = SYSTEMS = ("linux", "macos", "windows")
# Flags of os.open: files are read as bytes, and child processes do not inherit them.
READ = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
READ_NO_LINK = READ | getattr(os, "O_NOFOLLOW", 0)
_MACHINES = {"aarch64": "arm64", "arm64": "arm64", "x86_64": "x86-64", "amd64": "x86-64"}


def system() -> str:
    """The operating system: one of SYSTEMS, or Python's name for another one."""
    return {"darwin": MACOS, "win32": WINDOWS}.get(sys.platform, sys.platform)


def machine() -> str:
    """The CPU architecture: "x86-64" or "arm64", or the system's name for another one."""
    name = os.uname().machine if hasattr(os, "uname") else os.environ.get("PROCESSOR_ARCHITECTURE", "")
    return _MACHINES.get(name.lower(), name)


def allowed_cores() -> set[int]:
    """The numbers of the cores that this process may use; all cores if the system does not report them."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def mac_cores() -> int:
    """The number of a Mac's performance cores, or of all physical cores if they are alike; 0 on other systems."""
    return (mac_number("hw.perflevel0.physicalcpu") or mac_number("hw.physicalcpu")) if system() == MACOS else 0


def mac_number(name: str) -> int:
    """The number of a name in macOS's sysctl(3); 0 if there is none."""
    import ctypes

    library: Any = ctypes.CDLL(None)
    value, size = ctypes.c_int64(), ctypes.c_size_t(8)
    read = library.sysctlbyname
    read.argtypes = (ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    return value.value if read(name.encode(), ctypes.byref(value), ctypes.byref(size), None, 0) == 0 else 0


def can_pin() -> bool:
    """Whether threads can be pinned to cores."""
    return hasattr(os, "sched_setaffinity")


def anonymous_map(nbytes: int) -> mmap.mmap:
    """Private zeroed memory of this process. OSError if there is not enough."""
    if hasattr(mmap, "MAP_PRIVATE"):  # Linux gives shared memory no huge pages
        return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return mmap.mmap(-1, nbytes)


def physical_bytes() -> int:
    """The size of the machine's memory in bytes."""
    if hasattr(os, "sysconf"):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return _windows_memory()


def _windows_memory() -> int:
    """`ullTotalPhys` of GlobalMemoryStatusEx, whose struct has two 32-bit integers, then seven of 64 bits."""
    import ctypes

    status = (ctypes.c_uint64 * 8)()
    ctypes.cast(status, ctypes.POINTER(ctypes.c_uint32))[0] = ctypes.sizeof(status)
    ctypes.windll.kernel32.GlobalMemoryStatusEx(status)  # type: ignore[attr-defined]
    return status[1]

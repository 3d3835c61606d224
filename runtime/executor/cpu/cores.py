"""The cores that kernels may use."""

from __future__ import annotations

import os
from pathlib import Path


def usable_cores() -> int:
    """Physical cores that this process may use, within the quota of the control group; as many threads is the default.

    Of hyperthreads that share a core one is enough: kernels are bound by the core's arithmetic or by memory.
    """
    allowed = os.sched_getaffinity(0)
    cores = {
        read_text(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") or str(cpu) for cpu in allowed
    }
    quota, _, period = (read_text("/sys/fs/cgroup/cpu.max") or "max").partition(" ")
    granted = int(quota) // int(period) if quota.isdigit() and period.isdigit() else len(cores)
    return max(min(len(cores), granted), 1)


def read_text(file: str) -> str | None:
    """The content of a file of the kernel's, without blanks around it; None where there is none."""
    try:
        return Path(file).read_text().strip()
    except OSError:
        return None

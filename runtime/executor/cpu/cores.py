"""The cores that kernels may use."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import get_native_id

from ...errors import UsageError
from ...system import allowed_cores, can_pin, mac_cores

_MOST = 1 << 16  # cores of a machine
_AS_FAST = 0.7  # share of the fastest core's capacity from which a core counts as fast


def usable_cores(among: Collection[int] | None = None) -> int:
    """How many physical cores this process may use, out of `among` (None: `fast_cores`) and within the quotas of its
    control groups. This is the default number of threads.

    One of the hyperthreads of a core is enough, because kernels are limited by the core's arithmetic or by memory.
    """
    if among is None:
        count = mac_cores() or physical_cores(fast_cores(allowed_cores()))
    else:
        count = physical_cores(among)
    granted = granted_cores()
    return max(count if granted is None else min(count, int(granted)), 1)


def physical_cores(among: Collection[int]) -> int:
    """The number of physical cores among these CPUs: hyperthreads of one core count once."""
    return len({read_text(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") or cpu for cpu in among})


def fast_cores(allowed: Collection[int]) -> frozenset[int]:
    """The fastest cores: without the efficiency cores of a hybrid CPU, for which all others would wait at the end of
    each kernel. All cores if the system reports no difference."""
    listed = read_text("/sys/devices/cpu_core/cpus")  # Intel's performance cores; exists on hybrid CPUs only
    if listed:
        fast = read_cores(listed) & frozenset(allowed)
        return fast or frozenset(allowed)
    capacities = {cpu: read_text(f"/sys/devices/system/cpu/cpu{cpu}/cpu_capacity") or "" for cpu in allowed}
    known = {cpu: int(capacity) for cpu, capacity in capacities.items() if capacity.isdigit()}  # arm64's, up to 1024
    slow = {cpu for cpu, capacity in known.items() if capacity < _AS_FAST * max(known.values())}
    return frozenset(allowed) - slow


def preferred_cores(threads: int | None = None) -> frozenset[int] | None:
    """The cores to which kernel threads are pinned by default: the fastest ones. None (no pinning) if all cores are
    equally fast, or if there are fewer fast ones than `threads` (None: the default number)."""
    allowed = frozenset(allowed_cores())
    fast = fast_cores(allowed)
    return None if fast == allowed or (threads or 0) > physical_cores(fast) else fast


def granted_cores() -> float | None:
    """The number of cores that the quotas of this process's control groups and their parents allow; None without a
    quota. Reads cgroup v2 (cpu.max) and v1 (cpu.cfs_quota_us)."""
    found: list[float] = []
    for line in (read_text("/proc/self/cgroup") or "0::/").splitlines():
        number, names, path = (*line.split(":", 2), "", "")[:3]
        if number != "0" and "cpu" not in names.split(","):
            continue
        # v1 is mounted under the names of its controllers; `cpu` may be a link to it
        roots = ("/sys/fs/cgroup",) if number == "0" else ("/sys/fs/cgroup/cpu", f"/sys/fs/cgroup/{names}")
        # a container may see its own group as the root, or under the path that it has outside
        for folder in (root + part for root in roots for part in ("", *_with_parents(path))):
            if number == "0":
                quota, _, period = (read_text(f"{folder}/cpu.max") or "max").partition(" ")
            else:
                quota, period = (read_text(f"{folder}/cpu.cfs_{name}_us") or "" for name in ("quota", "period"))
            if quota.isdigit() and period.isdigit() and int(period):
                found.append(int(quota) / int(period))
    return min(found, default=None)


def _with_parents(path: str) -> Iterator[str]:
    """/a/b: /a/b and /a."""
    while path.strip("/"):
        yield path
        path = path.rpartition("/")[0]


def read_cores(text: str) -> frozenset[int]:
    """The CPU numbers that a text such as "0-7,8" names, as Linux counts them (each hyperthread is one). UsageError for
    a text of another form."""
    found: set[int] = set()
    for part in text.split(","):
        numbers = re.fullmatch(r"\s*([0-9]{1,6})(?:-([0-9]{1,6}))?\s*", part)
        first, last = (int(numbers[1]), int(numbers[2] or numbers[1])) if numbers else (1, 0)
        if not first <= last < _MOST:
            raise UsageError(f"cores = {text!r}: {part!r} is no core, or range of cores", "give them as in 0-7,8")
        found.update(range(first, last + 1))
    return frozenset(found)


class KernelCores:
    """Pins threads that run kernels to some cores. UsageError if the process may not use one of them."""

    def __init__(self, cores: frozenset[int]) -> None:
        self._cores = cores
        self._before: dict[int, set[int]] = {}  # the affinity of each thread before it was pinned
        if not can_pin():
            raise UsageError("cores: this operating system cannot pin threads to cores", "leave it out")
        allowed = allowed_cores()
        if refused := sorted(cores - allowed):
            known = ",".join(map(str, sorted(allowed)))
            raise UsageError(f"cores: this process may not use core {refused[0]}", f"it may use {known}")

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Threads that are started within this context stay pinned to the cores."""
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, self._cores)
        try:
            yield
        finally:
            os.sched_setaffinity(0, before)

    def enter(self) -> None:
        """Pin the calling thread, which also runs kernels, until `leave`."""
        thread = get_native_id()
        if thread not in self._before:
            self._before[thread] = os.sched_getaffinity(0)
            os.sched_setaffinity(0, self._cores)

    def leave(self) -> None:
        """Give the threads that have entered their former affinity. Calling it again does nothing."""
        while self._before:
            thread, before = self._before.popitem()
            with suppress(ProcessLookupError):  # the thread has ended
                os.sched_setaffinity(thread, before)


def read_text(file: str) -> str | None:
    """The content of a file in /sys or /proc, stripped; None if it cannot be read."""
    try:
        return Path(file).read_text().strip()
    except OSError:
        return None

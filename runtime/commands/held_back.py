"""Finds what slows an engine on this host below the speed of its cores and memory."""

from __future__ import annotations

import os
from collections.abc import Iterator

from ..executor.cpu.cores import fast_cores, granted_cores, read_text, usable_cores
from ..system import allowed_cores


def held_back(ranks: int) -> Iterator[tuple[str, str]]:
    """(finding, remedy) pairs, both as text; none if nothing slows the engine down. ranks: of the engine."""
    allowed = frozenset(allowed_cores())
    granted = granted_cores()
    if granted is not None and granted < len(allowed):
        threads = usable_cores()
        text = f"a quota of {granted:g} cores' time on {len(allowed)} cores"
        hint = "threads that have used it up wait for the next period: give whole cores instead (cpuset), or raise it"
        yield (
            text,
            hint if granted != threads else f"{threads} threads keep within it; cores of its own would be steadier",
        )
    slow = allowed - fast_cores(allowed)
    if slow:
        yield (
            f"{len(slow)} of {len(allowed)} cores are slower ones",
            "kernels use only the fast ones, unless --cores names others or --threads exceeds their number",
        )
    sockets = {read_text(f"/sys/devices/system/cpu/cpu{cpu}/topology/physical_package_id") or "0" for cpu in allowed}
    if len(sockets) > ranks:
        hint = f"each reads the others' memory: compile with --tensor-parallel {len(sockets)}, or run a replica on each"
        yield f"{len(sockets)} sockets, and {ranks} rank{'s' * (ranks > 1)}", hint
    busy = os.getloadavg()[0]
    if busy > max(len(allowed) / 4, 0.5):
        yield (
            f"a load of {busy:.1f} on {len(allowed)} cores",
            "other processes interrupt threads of the kernels, which wait for each other",
        )
    if "[never]" in (read_text("/sys/kernel/mm/transparent_hugepage/enabled") or ""):
        yield "no huge pages", "weights are read faster with transparent_hugepage/enabled at madvise"

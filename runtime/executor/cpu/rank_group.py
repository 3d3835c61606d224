"""The processes that run a CPU engine's program together with this one, each on its own cores."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial

from ..rank_processes import RankHello, RankProcesses
from .cores import fast_cores, read_text
from .rank_memory import RankMemory


class CpuRankHello(RankHello, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """See RankHello. isa: the instruction set of the library. threads, cores: for kernels. turns: how many steps may be
    in flight. shares_cache: whether its KV cache is in memory that rank 0 maps."""

    isa: str
    threads: int
    cores: list[int] | None
    turns: int = 1
    shares_cache: bool = False


class RankGroup(RankProcesses):
    """The processes of ranks 1 and up of an engine, which share `memory`. When one of them ends, all later steps
    fail."""

    def __init__(self, memory: RankMemory, hellos: Sequence[CpuRankHello], stages: int = 1) -> None:
        super().__init__(f"{__package__}.rank_main", hellos, memory.descriptor, partial(memory.stop, stages))


def cores_by_rank(count: int, allowed: frozenset[int] | None = None) -> list[list[int] | None]:
    """The cores of each rank, neighbours together, so that a rank has its own socket if there are several; None for
    every rank if there are fewer cores than ranks. allowed: the cores to divide; None: the fast ones that this process
    may use."""
    cpus = sorted(allowed if allowed is not None else fast_cores(os.sched_getaffinity(0)), key=_place)
    cores = list({_siblings(cpu): cpu for cpu in reversed(cpus)}.values())[::-1]
    if len(cores) < count:
        return [None] * count
    size = len(cores) // count
    return [cores[rank * size : (rank + 1) * size] for rank in range(count)]


def _place(cpu: int) -> tuple[int, int]:
    package = read_text(f"/sys/devices/system/cpu/cpu{cpu}/topology/physical_package_id")
    return int(package or 0), cpu


def _siblings(cpu: int) -> str:
    return read_text(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") or str(cpu)

"""Memory of an executor: anonymous maps, and the number of KV blocks that the machine can hold."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable, Sequence
from pathlib import Path

from ...errors import CapacityError
from ...format.footprint import KV_SHARES
from ...format.kv import KVLayout, KVMemory
from ...format.manifest import Limits
from ...system import anonymous_map, physical_bytes
from .cores import read_text

_HUGE = 2 << 20
_HUGE_PAGES = "/sys/kernel/mm/transparent_hugepage/enabled"


class AnonymousMemory:
    """Zeroed, page-aligned memory; pages take memory when first touched. Memory of 2 MiB or more begins and ends at the
    boundary of a huge page."""

    def __init__(self, nbytes: int) -> None:
        size = max(nbytes, mmap.PAGESIZE) if nbytes < _HUGE else -(-nbytes // _HUGE) * _HUGE + _HUGE
        try:
            self._map = anonymous_map(size)
        except OSError as error:
            raise CapacityError(f"cannot reserve {nbytes / 2**20:.0f} MiB of memory: {error.strerror}") from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                self._map.madvise(mmap.MADV_HUGEPAGE)
            except OSError:
                pass  # a kernel without huge pages: slower, but works
        self._anchor: ctypes.Array[ctypes.c_char] | None = ctypes.c_char.from_buffer(self._map)  # type: ignore[assignment]
        self.address = ctypes.addressof(self._anchor)  # type: ignore[arg-type]
        if nbytes >= _HUGE:
            self.address = -(-self.address // _HUGE) * _HUGE

    def close(self) -> None:
        """Give the memory back; views of it must be gone."""
        self._anchor = None
        self._map.close()


def choose_blocks(
    kv: KVLayout, limits: Limits, kv_bytes: int | None = None, more_blocks: Sequence[int] = ()
) -> KVMemory:
    """How many KV blocks of each group to allocate.

    Enough for a full batch of sequences of full length, within `kv_bytes` (None: a share of the available memory), plus
    `more_blocks` of each group. CapacityError if not even one sequence of full length fits.
    """
    one, batch = (kv.blocks_needed(limits, sequences) for sequences in (1, limits.max_batch_size))
    budget = int(available_bytes() * KV_SHARES["cpu"]) if kv_bytes is None else kv_bytes
    if (needed := KVMemory(kv, one).nbytes) > budget:
        raise CapacityError(
            f"the KV cache of one sequence of {limits.max_seq_len} tokens needs "
            f"{needed / 2**20:.1f} MiB, have {budget / 2**20:.1f} MiB",
            "free memory, give the KV cache more (--kv-mib, or kv_bytes in Python), or compile with a smaller "
            "--max-seq-len",
        )
    chosen = kv.split(budget, one, batch)
    return KVMemory(kv, tuple(map(sum, zip(chosen, more_blocks, strict=True))) if more_blocks else chosen)


def touched_bytes(ranges: Iterable[tuple[int, int]], nbytes: int) -> int:
    """How many bytes an AnonymousMemory of `nbytes` occupies after these ranges (offset, size in bytes) were written:
    whole pages, huge ones if the machine has them."""
    huge = "[never]" not in (read_text(_HUGE_PAGES) or "[never]")
    whole = -(-nbytes // _HUGE) * _HUGE if huge and nbytes >= _HUGE else 0  # pages are small otherwise
    total = end = 0
    for at, size in sorted(ranges):
        for low, high, page in ((at, min(at + size, whole), _HUGE), (max(at, whole), at + size, mmap.PAGESIZE)):
            if low < high:
                first, last = max(low // page * page, end), -(-high // page) * page
                total, end = total + max(last - first, 0), max(last, end)
    return total


def available_bytes() -> int:
    """Bytes that can be allocated without swapping, within the limit of the control group."""
    available = physical_bytes()
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    except OSError:
        pass
    limit, used = _read_number("/sys/fs/cgroup/memory.max"), _read_number("/sys/fs/cgroup/memory.current")
    if limit is not None:
        available = min(available, max(limit - (used or 0), 0))
    return available


def _read_number(file: str) -> int | None:
    text = read_text(file)
    return int(text) if text is not None and text.isdigit() else None

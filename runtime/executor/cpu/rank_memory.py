"""The memory that ranks of one machine share: their messages and the arrays of a step."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from ...batch.packed import CODES
from ...errors import CapacityError
from ...format.batch import BatchArray, BatchLimits

_CONTROL = 40 << 10  # bytes, of RankControl and RankRing in codegen_templates/cpp
_SLOT = 1 << 20  # bytes that a rank passes to the others at a time; each rank has two slots
_LINE = 64
_GROUP = 1 << 10  # bytes between the control blocks of two stages, if a stage has several ranks; see stages.h
_ASKED, _LOGITS = "asked", "logits"  # the rows that a section is asked for; the logits that the last stage writes


class StepArrays(NamedTuple):
    """A step's input arrays by name and its logits, in memory that all ranks map."""

    arrays: Mapping[str, memoryview[Any]]
    logits: memoryview | None


class RankMemory:
    """Anonymous memory that each of `count` ranks maps: a control block, two slots per rank, then the arrays of a step
    by name, for each of `turns` steps that may be in flight. It has no name that another process could open.

    asked: int32 [logit_rows], the rows that rank 0 asks a section for.

    descriptor: the file descriptor of memory that another process made; None: make it. logits_bytes: the size of the
    logits, if another rank computes them than the one that samples.
    """

    def __init__(
        self,
        count: int,
        arrays: Sequence[BatchArray],
        limits: BatchLimits,
        descriptor: int | None = None,
        logits_bytes: int = 0,
        turns: int = 1,
    ) -> None:
        self.count, self.slot_bytes = count, _SLOT
        places: dict[tuple[int, str], tuple[int, int, Any]] = {}
        at = _CONTROL + 2 * count * _SLOT
        sizes = [(array.name, limits.nbytes(array), CODES[array.dtype]) for array in arrays]
        sizes += [(_ASKED, 4 * limits.logit_rows, "i"), (_LOGITS, logits_bytes, "B")]
        for turn in range(turns):
            for name, nbytes, code in sizes:
                places[turn, name] = at, nbytes, code
                at += -(-max(nbytes, 4) // _LINE) * _LINE
        self._end = -(-at // mmap.PAGESIZE) * mmap.PAGESIZE
        if descriptor is None:
            descriptor = os.memfd_create("icc-ranks", os.MFD_CLOEXEC)
            os.ftruncate(descriptor, at)
        self.descriptor = descriptor
        self._map = mmap.mmap(descriptor, at, flags=mmap.MAP_SHARED)
        self._bytes = memoryview(self._map)
        self._anchor: ctypes.Array[ctypes.c_char] | None = (ctypes.c_char * at).from_buffer(self._map)
        self.control = ctypes.addressof(self._anchor)
        self.slots = self.control + _CONTROL
        parts = {
            place: self._bytes[first : first + nbytes].cast(code) for place, (first, nbytes, code) in places.items()
        }
        self.asked: memoryview[Any] = parts[0, _ASKED]
        self.turns = [
            StepArrays(
                {array.name: parts[turn, array.name] for array in arrays},
                parts[turn, _LOGITS] if logits_bytes else None,
            )
            for turn in range(turns)
        ]

    def stage(self, values: bytes | memoryview) -> None:
        """Write bytes to the slots, at most `stage_bytes`, while no rank runs anything."""
        first = _CONTROL
        self._bytes[first : first + len(values)] = values

    @property
    def stage_bytes(self) -> int:
        """The largest number of bytes that `stage` takes."""
        return 2 * self.count * self.slot_bytes

    def caches(self, own: int, nbytes: int) -> RankCaches:
        """Map the KV caches of all ranks, which lie at the end of the memory. own: this rank's number. nbytes: of each
        cache. CapacityError if the machine does not have so much memory."""
        size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        whole = self._end + self.count * size
        try:
            if os.fstat(self.descriptor).st_size < whole:
                os.ftruncate(self.descriptor, whole)
            mapped = mmap.mmap(self.descriptor, whole - self._end, flags=mmap.MAP_SHARED, offset=self._end)
        except OSError as error:
            raise CapacityError(f"cannot reserve {whole / 2**20:.0f} MiB of memory: {error.strerror}") from error
        return RankCaches(mapped, own, size)

    def stop(self, stages: int = 1) -> None:
        """Tell all ranks that one is gone, so that none waits for another. stages: how many stages of several ranks
        there are, or 1."""
        for stage in range(stages if self._anchor is not None else 0):
            ctypes.c_int32.from_address(self.control + stage * _GROUP).value = 1

    def close(self) -> None:
        """Unmap the memory; arrays that came from it are invalid then. It is freed when all ranks have closed it."""
        self._anchor = None
        os.close(self.descriptor)


class RankCaches:
    """The KV caches of all ranks, `size` bytes each, as one rank maps them; used in place of AnonymousMemory."""

    def __init__(self, mapped: mmap.mmap, own: int, size: int) -> None:
        with suppress(OSError):  # a kernel without huge pages: slower, but works
            mapped.madvise(mmap.MADV_HUGEPAGE)
        self._bytes, self._size = memoryview(mapped), size
        self._anchor: ctypes.c_char | None = ctypes.c_char.from_buffer(mapped)
        self.address = ctypes.addressof(self._anchor) + own * size

    def views(self, offset: int, nbytes: int) -> list[memoryview]:
        """Writable uint8 views of bytes [offset, offset + nbytes) of each rank's cache."""
        return [self._bytes[at : at + nbytes] for at in range(offset, len(self._bytes), self._size)]

    def close(self) -> None:
        """Unmap the memory; views of it must be gone."""
        self._anchor = None
        self._bytes.release()

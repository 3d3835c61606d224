"""The memory that ranks of one machine share: what they tell each other, and the arrays of a step."""

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
_SLOT = 1 << 20  # bytes of what a rank gives the others at a time; each has two
_LINE = 64
_GROUP = 1 << 10  # bytes from the control block of a stage of several ranks to the next one's, see stages.h
_ASKED, _LOGITS = "asked", "logits"  # the rows that a section is asked for; what the last of a pipeline writes


class StepArrays(NamedTuple):
    """What a step is given, by name, and its logits, where all ranks see them."""

    arrays: Mapping[str, memoryview[Any]]
    logits: memoryview | None


class RankMemory:
    """Anonymous memory of `count` ranks, each of which maps it: a control block, two slots per rank, then the arrays of
    a step by name, for each of `turns` steps that may be under way. It has no name that another process could open.

    asked: int32 [logit_rows], where rank 0 puts the rows that it asks a section for.

    descriptor: of a memory that another process has made; None makes one. logits_bytes: of the logits, where they come
    from another rank than the one that samples.
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
        """Put bytes into the slots, as many as fit there, while no rank runs anything."""
        first = _CONTROL
        self._bytes[first : first + len(values)] = values

    @property
    def stage_bytes(self) -> int:
        """How many bytes `stage` takes."""
        return 2 * self.count * self.slot_bytes

    def caches(self, own: int, nbytes: int) -> RankCaches:
        """The KV caches of all ranks, behind everything else; `own` is the number of this one. nbytes: of each.
        CapacityError if the machine does not have them."""
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
        """Tell all ranks that one is gone: none waits for another after that. stages: of several ranks each, or 1."""
        for stage in range(stages if self._anchor is not None else 0):
            ctypes.c_int32.from_address(self.control + stage * _GROUP).value = 1

    def close(self) -> None:
        """Give the memory back once all others have; what it gave out is invalid then."""
        self._anchor = None
        os.close(self.descriptor)


class RankCaches:
    """The KV caches of all ranks, each of `size` bytes, as one of them maps them; in place of AnonymousMemory."""

    def __init__(self, mapped: mmap.mmap, own: int, size: int) -> None:
        with suppress(OSError):  # a kernel without huge pages: only slower
            mapped.madvise(mmap.MADV_HUGEPAGE)
        self._bytes, self._size = memoryview(mapped), size
        self._anchor: ctypes.c_char | None = ctypes.c_char.from_buffer(mapped)
        self.address = ctypes.addressof(self._anchor) + own * size

    def views(self, offset: int, nbytes: int) -> list[memoryview]:
        """Bytes [offset, offset + nbytes) of each rank's cache, uint8, writable."""
        return [self._bytes[at : at + nbytes] for at in range(offset, len(self._bytes), self._size)]

    def close(self) -> None:
        """Give the memory back once nobody has views of it."""
        self._anchor = None
        self._bytes.release()

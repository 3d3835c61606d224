"""Maps weights files: safetensors whose tensors are opaque packed bytes. Nothing is copied."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from ..address import address_of
from ..errors import EngineFormatError
from .program import Program, WeightEntry

if TYPE_CHECKING:
    import numpy as np
else:
    from ..late import np

ALIGNMENT = 64
_HINT = "copy the engine again from where it was made, or compile the model again"


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor of a safetensors header; offsets are relative to the end of the header."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class MappedWeights:
    """The tensors of a mapped weights file `name`, and those of the file `below` that this one does not contain.
    Addresses are valid until `close`, which unmaps the files."""

    def __init__(self, mapped: memoryview, name: str, below: MappedWeights | None = None) -> None:
        self._name, self._bytes, self._below = name, mapped, below
        self._entries = self._parse_header()

    def _parse_header(self) -> dict[str, tuple[int, int]]:
        """name -> (offset in the file, size in bytes)."""
        total = len(self._bytes)
        size = int.from_bytes(self._bytes[:8], "little") if total >= 8 else total
        if 8 + size > total:
            raise self._damaged("its header is longer than the file")
        try:
            raw = msgspec.json.decode(self._bytes[8 : 8 + size], type=dict[str, msgspec.Raw])
            msgspec.json.decode(raw.pop("__metadata__", msgspec.Raw(b"{}")), type=dict[str, str])
            header = {name: msgspec.json.decode(value, type=_Entry) for name, value in raw.items()}
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise self._damaged(f"its header is not valid: {error}") from error
        entries: dict[str, tuple[int, int]] = {}
        for name, entry in header.items():
            first, last = entry.data_offsets
            if entry.dtype != "U8" or entry.shape != [last - first] or not 0 <= first <= last <= total - 8 - size:
                raise self._damaged(f"tensor {name!r} is not a byte range of it")
            if (8 + size + first) % ALIGNMENT:
                raise self._damaged(f"tensor {name!r} is not aligned to {ALIGNMENT} bytes")
            entries[name] = (8 + size + first, last - first)
        end = 8 + size
        for offset, nbytes in sorted(entries.values()):
            if offset != end:
                raise self._damaged("its tensors overlap, or leave bytes between them")
            end += nbytes
        if end != total:
            raise self._damaged("there are bytes after its tensors")
        return entries

    def _damaged(self, reason: str) -> EngineFormatError:
        return EngineFormatError(f"{self._name} is damaged: {reason}", _HINT)

    def addresses(self, program: Program, pools: Mapping[str, int], some: bool = False) -> list[int]:
        """The address of each weight, in the order of `program.weights`. pools: addresses of weights that are not in
        the file. some: whether weights may be missing; their address is then 0.

        EngineFormatError if one is missing, has another size, or the file holds a tensor the program does not know.
        """
        known = self._names() if some else program.weights.keys()
        found = {
            name: pools.get(name) or (self._address(name, entry) if name in known else 0)
            for name, entry in program.weights.items()
        }
        self._check_known(program)
        return list(found.values())

    def sizes(self) -> dict[str, int]:
        """The size in bytes of each tensor of this file, in its order."""
        return {name: nbytes for name, (_, nbytes) in self._entries.items()}

    def _names(self) -> set[str]:
        """The names of all weights, those of the file below included."""
        return set(self._entries) | (set() if self._below is None else self._below._names())

    def _address(self, name: str, weight: WeightEntry) -> int:
        if name not in self._entries:
            if self._below is not None:
                return self._below._address(name, weight)
            raise self._damaged(f"weight {name!r} is missing")
        offset, nbytes = self._entries[name]
        if nbytes != weight.nbytes:
            raise self._damaged(f"weight {name!r} has {nbytes} bytes, the program says {weight.nbytes}")
        return address_of(self._bytes) + offset

    def _check_known(self, program: Program) -> None:
        unknown = sorted(self._entries.keys() - program.stored.keys())
        if unknown:
            raise self._damaged(f"weight {unknown[0]!r} is not in the program")
        if self._below is not None:
            self._below._check_known(program)

    def view(self, name: str) -> np.ndarray:
        """A read-only view of one weight's bytes, uint8 `[nbytes]`, not copied. KeyError if there is no such weight."""
        if name not in self._entries and self._below is not None:
            return self._below.view(name)
        offset, nbytes = self._entries[name]
        return np.frombuffer(self._bytes, np.uint8)[offset : offset + nbytes]

    def close(self) -> None:
        """Unmap the files. Addresses and views of them are invalid from then on."""
        if self._below is not None:
            self._below.close()
        try:
            self._bytes.release()
        except BufferError:  # a view still exists: the file is unmapped with it
            pass
        self._bytes = memoryview(b"")

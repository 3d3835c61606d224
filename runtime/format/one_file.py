"""OneFile: an engine as one uncompressed zip archive, preceded by a line that starts Python, and mapped in place.

Its directory is parsed here and not by `zipfile`, which takes longer to import than all of this and accepts archives
that are no engines. Format: PKWARE's APPNOTE.TXT 6.3.10, with Zip64.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import EngineFormatError
from ..system import READ

ALIGNMENT = 64  # bytes; a mapped entry begins at a multiple of this, as the tensors in it do
_END, _END_MARK = struct.Struct("<4s4H2LH"), b"PK\5\6"
_PLACE64, _PLACE64_MARK = struct.Struct("<4sLQL"), b"PK\6\7"
_END64, _END64_MARK = struct.Struct("<4sQ2H2L4Q"), b"PK\6\6"
_ENTRY, _ENTRY_MARK = struct.Struct("<4s6H3L5H2L"), b"PK\1\2"
_LOCAL, _LOCAL_MARK = struct.Struct("<4s5H3L2H"), b"PK\3\4"
_FULL = 0xFFFFFFFF  # the value is in the Zip64 field
_ZIP64 = 1  # the id of that field
_ENCRYPTED = 1
_HINT = "copy the engine again from where it was made, or pack it again: icc pack"


class OneFile:
    """The files of a one-file engine. EngineFormatError if the file is damaged.

    It stays mapped as long as this object or a view of it exists: replacing the file does not change what is read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open(os.open(path, READ), "rb", buffering=0) as stream:
                self.modified = os.fstat(stream.fileno()).st_mtime
                self._bytes = memoryview(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ))
        except (OSError, ValueError) as error:  # ValueError: the file is empty
            raise EngineFormatError(f"{path} cannot be mapped: {error}", _HINT) from error
        try:
            self._ranges = self._read_directory()
        except (struct.error, UnicodeDecodeError) as error:
            raise self._damaged(f"its directory cannot be read: {error}") from error

    def sizes(self) -> dict[str, int]:
        """The size in bytes of each entry, by name."""
        return {name: size for name, (_, size) in self._ranges.items()}

    def size(self, name: str) -> int:
        """The size of an entry in bytes."""
        return len(self._view(name))

    def read(self, name: str) -> bytes:
        """A copy of an entry's content."""
        return bytes(self._view(name))

    def map(self, name: str) -> memoryview:
        """A view of an entry's content in place. EngineFormatError also if it is not aligned to ALIGNMENT bytes."""
        view, start = self._view(name), self._ranges[name][0]
        if not len(view):
            raise EngineFormatError(f"{name} cannot be mapped: it is empty", _HINT)
        if start % ALIGNMENT:
            raise EngineFormatError(
                f"{name} begins at byte {start} of {self.path}, which is no multiple of {ALIGNMENT}",
                "pack it with `icc pack`: other programs do not align",
            )
        return view

    @contextmanager
    def reading(self) -> Iterator[Callable[[str], bytes]]:
        """`read` itself: the file is open already."""
        yield self.read

    def _view(self, name: str) -> memoryview:
        if name not in self._ranges:
            raise EngineFormatError(f"{name} is missing in {self.path}", _HINT)
        start, size = self._ranges[name]
        return self._bytes[start : start + size]

    def _damaged(self, reason: str) -> EngineFormatError:
        return EngineFormatError(f"{self.path} is damaged: {reason}", _HINT)

    def _read_directory(self) -> dict[str, tuple[int, int]]:
        """name -> (offset in the file, size in bytes). Refuses compressed entries, overlapping ones, and two of one
        name."""
        count, at, end = self._find_directory()
        found: dict[str, tuple[int, int]] = {}
        spans: list[tuple[int, int, str]] = []
        for _ in range(count):
            mark, _, _, flags, method, _, _, _, packed, size, *lengths, _, _, _, offset = _ENTRY.unpack_from(
                self._bytes, at
            )
            if mark != _ENTRY_MARK:
                raise self._damaged("its directory is not one")
            body = at + _ENTRY.size
            raw, extra, at = _split(self._bytes, body, lengths)
            name = raw.decode()
            if name in found:
                raise self._damaged(f"{name!r} is in it twice")
            if method or flags & _ENCRYPTED:
                kind = "encrypted" if flags & _ENCRYPTED else "compressed"
                raise self._damaged(f"{name!r} is {kind}, and must lie there as it is")
            size, packed, offset = _wide(extra, size, packed, offset)
            start = self._start_of(raw, offset)
            if packed != size or start + size > end:
                raise self._damaged(f"{name!r} is longer than the file")
            found[name] = start, size
            spans.append((offset, start + size, name))
        if at != end:
            raise self._damaged("its directory has another length than it says")
        self._check_apart(spans)
        return found

    def _find_directory(self) -> tuple[int, int, int]:
        """(number of entries, first byte of the directory, the byte after it), from the record at the end of the
        file."""
        at = len(self._bytes) - _END.size
        if at < 0 or self._bytes[at : at + 4] != _END_MARK:
            raise self._damaged("it does not end as a zip archive does (is it cut off?)")
        _, _, _, _, count, size, start, _ = _END.unpack_from(self._bytes, at)
        place = at - _PLACE64.size
        if place >= 0 and self._bytes[place : place + 4] == _PLACE64_MARK:
            _, _, at, _ = _PLACE64.unpack_from(self._bytes, place)
            mark, _, _, _, _, _, _, count, size, start = _END64.unpack_from(self._bytes, at)
            if mark != _END64_MARK:
                raise self._damaged("its Zip64 directory is not where it should be")
        if start + size != at:
            raise self._damaged("its directory is not where it should be")
        return count, start, at

    def _start_of(self, name: bytes, offset: int) -> int:
        """The offset of an entry's content; its local header is at `offset`."""
        mark, *_, name_length, extra_length = _LOCAL.unpack_from(self._bytes, offset)
        start = offset + _LOCAL.size
        if mark != _LOCAL_MARK or self._bytes[start : start + name_length] != name:
            raise self._damaged(f"{name.decode()!r} is not where its directory says")
        return start + name_length + extra_length

    def _check_apart(self, spans: list[tuple[int, int, str]]) -> None:
        before = 0
        for start, end, name in sorted(spans):
            if start < before:
                raise self._damaged(f"{name!r} overlaps another entry")
            before = end


def _split(content: memoryview, at: int, lengths: list[int]) -> tuple[bytes, memoryview, int]:
    """(name, extra fields, offset of the next entry of the directory)."""
    name, extra, comment = lengths
    return bytes(content[at : at + name]), content[at + name : at + name + extra], at + name + extra + comment


def _wide(extra: memoryview, *values: int) -> list[int]:
    """Size, packed size and offset; values that do not fit 32 bits are taken, in order, from the Zip64 field."""
    field, at = memoryview(b""), 0
    while at + 4 <= len(extra):
        kind, size = int.from_bytes(extra[at : at + 2], "little"), int.from_bytes(extra[at + 2 : at + 4], "little")
        if kind == _ZIP64:
            field = extra[at + 4 : at + 4 + size]
        at += 4 + size
    found: list[int] = []
    for value in values:
        if value == _FULL and len(field) >= 8:
            value, field = int.from_bytes(field[:8], "little"), field[8:]
        found.append(value)
    return found

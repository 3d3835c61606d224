"""The files of an engine directory: what was hashed is what is used, whoever replaces a file in between."""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

from ..errors import EngineChangedError, EngineFormatError
from .manifest import PIECE, FileEntry
from .present import MANIFEST_FILE

HashPieces = Callable[[memoryview, int], list[str]]  # the sha256 (hex) of each so many bytes of a whole number of them
_GROUP = 16  # pieces that a thread hashes at a time, as many as a vector has lanes at most
_HINT = "copy the engine again from where it was made, or compile the model again"


class EngineFiles:
    """Opens and reads the files that a manifest lists; paths are those of the manifest, relative to `root`.

    With `verify`, whatever `read` returns has the sha256 of the manifest, and so has what `check` was given as mapped.
    (A mapped file may still be changed in place: whoever may do that can change a running process as well.)
    """

    def __init__(self, root: Path, files: Mapping[str, FileEntry], verify: bool) -> None:
        self._root, self._files, self._verify = root, files, verify
        self._contents: dict[str, bytes] = {}  # checked, and not yet asked for

    def open(self, path: str) -> BinaryIO:
        """A file, unbuffered; no link is followed."""
        try:
            return open(os.open(self._root / path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb", buffering=0)
        except OSError as error:
            raise _unreadable(path, error) from error

    def map(self, path: str) -> mmap.mmap:
        """A read-only memory map of a file."""
        with self.open(path) as stream:
            try:
                return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
            except (OSError, ValueError) as error:  # ValueError: the file is empty
                raise EngineFormatError(f"{path} cannot be mapped: {error}", _HINT) from error

    def read(self, path: str) -> bytes:
        """The content of a file. EngineFormatError if it has changed."""
        content = self._contents.pop(path, None)
        if content is None:
            content = self._read(path)
            if self._verify and _sha256(content) != self._files[path].sha256:
                raise _changed(path)
        return content

    def check(
        self, used: Collection[str], mapped: Mapping[str, memoryview], hash_pieces: HashPieces | None = None
    ) -> None:
        """EngineFormatError for the first file (by path) whose sha256 differs; nothing to do without `verify`.

        The contents of `used` are kept for `read`; a file that is mapped already is hashed where it is mapped, in
        pieces, by all cores; `hash_pieces` does that faster than hashlib.
        """
        if not self._verify:
            return
        hash_pieces = hash_pieces or _hash_pieces

        def unchanged(part: tuple[str, slice | None]) -> bool:
            path, some = part
            if some is not None:
                content, pieces = mapped[path][some.start * PIECE : some.stop * PIECE], self._files[path].pieces[some]
                return pieces == (_hash_pieces if len(content) % PIECE else hash_pieces)(content, PIECE)
            content = mapped[path] if path in mapped else self._read(path)
            if path in used:
                self._contents[path] = bytes(content)
            return _sha256(content) == self._files[path].sha256

        parts: list[tuple[str, slice | None]] = []
        for path in sorted(self._files, key=lambda path: -self._files[path].size):
            pieces = self._files[path].pieces if path in mapped else []
            if pieces and (len(pieces) - 1) * PIECE < len(mapped[path]) <= len(pieces) * PIECE:
                full = len(mapped[path]) // PIECE
                parts += [(path, slice(at, min(at + _GROUP, full))) for at in range(0, full, _GROUP)]
                parts += [(path, slice(full, full + 1))] * (full < len(pieces))
            else:
                parts.append((path, None))
        with ThreadPoolExecutor(min(len(parts), os.cpu_count() or 1) or 1) as threads:
            wrong = {path for (path, _), same in zip(parts, threads.map(unchanged, parts), strict=True) if not same}
        if wrong:
            raise _changed(min(wrong))

    def _read(self, path: str) -> bytes:
        with self.open(path) as stream:
            try:
                return stream.read()
            except OSError as error:
                raise _unreadable(path, error) from error


def _sha256(content: bytes | memoryview) -> str:
    return hashlib.sha256(content).hexdigest()


def _hash_pieces(content: memoryview, size: int) -> list[str]:
    return [_sha256(content[at : at + size]) for at in range(0, len(content), size)]


def _changed(path: str) -> EngineChangedError:
    return EngineChangedError(f"{path} has changed: its sha256 is not the one in {MANIFEST_FILE}", _HINT)


def _unreadable(path: str, error: OSError) -> EngineFormatError:
    return EngineFormatError(f"{path} cannot be read: {error.strerror}", _HINT)

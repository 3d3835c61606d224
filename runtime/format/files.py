"""The files of an engine directory: what was hashed is what is used, whoever replaces a file in between."""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import BinaryIO

from ..errors import EngineChangedError, EngineFormatError
from .comparison import Comparison, Part
from .manifest import PIECE, FileEntry
from .present import MANIFEST_FILE

HashPieces = Callable[[memoryview, int], list[str]]  # the sha256 (hex) of each so many bytes of a whole number of them
_GROUP = 16  # pieces that a thread hashes at a time, as many as a vector has lanes at most
_LARGE = 1 << 20  # bytes; smaller files take no longer than the threads' talk about them
_SMALL = 1 << 16  # most files are smaller; room for this is had without asking the kernel
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_HINT = "copy the engine again from where it was made, or compile the model again"


class EngineFiles:
    """Opens and reads the files that a manifest lists; paths are those of the manifest, relative to `root`.

    With `verify`, whatever `read` returns has the sha256 of the manifest, and so has what `begin` was given as mapped
    once `finish` returns.
    (A mapped file may still be changed in place: whoever may do that can change a running process as well.)
    """

    def __init__(self, root: Path, files: Mapping[str, FileEntry], verify: bool) -> None:
        self._root, self._files, self._verify = root, files, verify
        self._contents: dict[str, bytes] = {}  # checked, and not yet asked for
        self._used: frozenset[str] = frozenset()
        self._begun: set[str] = set()
        self._comparison: Comparison | None = None

    def open(self, path: str) -> BinaryIO:
        """A file, unbuffered; no link is followed."""
        try:
            return open(os.open(self._root / path, _READ), "rb", buffering=0)
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

    def begin(
        self, used: Collection[str], mapped: Mapping[str, memoryview], hash_pieces: HashPieces | None = None
    ) -> None:
        """Start to compare the large files, on other threads: nothing to do without `verify`. Ends with `finish`.

        The contents of `used` are kept for `read`; a file that is mapped is hashed where it is mapped, in pieces, and
        `hash_pieces` does that faster than hashlib.
        """
        self._used = frozenset(used)
        parts: list[Part] = []
        for path, entry in sorted(self._files.items(), key=lambda item: -item[1].size) if self._verify else ():
            if path in mapped:
                parts += self._mapped_parts(path, mapped[path], hash_pieces or _hash_pieces)
            elif entry.size > _LARGE:
                parts.append((path, partial(self._is_same, path)))
        self._begun = {path for path, _ in parts}
        self._comparison = Comparison(parts)

    def finish(self) -> None:
        """EngineFormatError for the first file (by path) whose sha256 differs; nothing to do without `verify`.

        Compares the small files here, and helps with those that were begun.
        """
        if not self._verify or self._comparison is None:
            return
        comparison, self._comparison = self._comparison, None
        folder = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            wrong = {path for path in self._files.keys() - self._begun if not self._is_same(path, folder)}
        finally:
            os.close(folder)
        wrong |= comparison.finish()
        if wrong:
            raise _changed(min(wrong))

    def drop(self) -> None:
        """Stop what was begun: the mapped files are of no use any more."""
        comparison, self._comparison = self._comparison, None
        if comparison is not None:
            comparison.drop()

    def _mapped_parts(self, path: str, content: memoryview, hash_pieces: HashPieces) -> list[Part]:
        """What is to be compared of a mapped file: its pieces, of which all but the last are whole."""
        pieces = self._files[path].pieces
        if not pieces or not (len(pieces) - 1) * PIECE < len(content) <= len(pieces) * PIECE:
            return [(path, lambda: _sha256(content) == self._files[path].sha256)]

        def same(first: int, last: int, hashed: HashPieces) -> bool:
            return hashed(content[first * PIECE : last * PIECE], PIECE) == pieces[first:last]

        full = len(content) // PIECE
        ends = [(at, min(at + _GROUP, full), hash_pieces) for at in range(0, full, _GROUP)]
        ends += [(full, full + 1, _hash_pieces)] * (full < len(pieces))
        return [(path, partial(same, *end)) for end in ends]

    def _is_same(self, path: str, folder: int | None = None) -> bool:
        content = self._read(path, folder)
        if path in self._used:
            self._contents[path] = content
        return _sha256(content) == self._files[path].sha256

    def _read(self, path: str, folder: int | None = None) -> bytes:
        """All of a file; folder: a descriptor of the root, which saves time for many."""
        try:
            descriptor = os.open(self._root / path if folder is None else path, _READ, dir_fd=folder)
            try:
                pieces: list[bytes] = []
                while piece := os.read(descriptor, _LARGE if pieces else _SMALL):
                    pieces.append(piece)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise _unreadable(path, error) from error
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _sha256(content: bytes | memoryview) -> str:
    return hashlib.sha256(content).hexdigest()


def _hash_pieces(content: memoryview, size: int) -> list[str]:
    return [_sha256(content[at : at + size]) for at in range(0, len(content), size)]


def _changed(path: str) -> EngineChangedError:
    return EngineChangedError(f"{path} has changed: its sha256 is not the one in {MANIFEST_FILE}", _HINT)


def _unreadable(path: str, error: OSError) -> EngineFormatError:
    return EngineFormatError(f"{path} cannot be read: {error.strerror}", _HINT)

"""The files of an engine. The bytes that were verified are those that are used, even if a file is replaced in
between."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping
from ctypes import Array, c_char, c_int64
from functools import partial
from pathlib import Path

from ..errors import EngineChangedError
from ..system import allowed_cores
from .comparison import Comparison, Part
from .container import Container
from .manifest import PIECE, BaseEngine, FileEntry
from .open_container import open_container
from .present import MANIFEST_FILE

# Writes BLAKE3 digests of pieces (bytes, piece size, number of the next piece, digests); threads share the last two.
DigestPieces = Callable[[memoryview, int, c_int64, "Array[c_char]"], None]
_LARGE = 1 << 20  # bytes; hashing a smaller file costs less than handing it to a thread
_HINT = "copy the engine again from where it was made, or compile the model again"


class EngineFiles:
    """Reads and maps the files that a manifest lists. Paths are those of the manifest, within `container`, or within
    `base` for files that are shared with it.

    With `verify`, the bytes that `read` returns have the sha256 of the manifest. When `finish` returns, the mapped
    files that were passed to `begin` have it, too. (A mapped file may still be changed in place, but whoever can do
    that can also change a running process.)
    """

    def __init__(
        self, container: Container, files: Mapping[str, FileEntry], verify: bool, base: BaseEngine | None = None
    ) -> None:
        self._container, self._files, self._verify = container, files, verify
        self._shared = {} if base is None else dict.fromkeys(base.shared, open_container(Path(base.path)))
        self._contents: dict[str, bytes] = {}  # verified, but not yet read
        self._used: frozenset[str] = frozenset()
        self._begun: set[str] = set()
        self._compared = files
        self._comparison: Comparison | None = None
        self._pieces: list[_Pieces] = []

    @property
    def verifies(self) -> bool:
        """Whether files are compared with their digests."""
        return self._verify

    def map(self, path: str) -> memoryview:
        """A read-only view of a file, not copied; valid as long as the view exists."""
        return self._place(path).map(path)

    def _place(self, path: str) -> Container:
        return self._shared.get(path, self._container)

    def read(self, path: str) -> bytes:
        """The content of a file. EngineFormatError if it has changed."""
        content = self._contents.pop(path, None)
        if content is None:
            content = self._place(path).read(path)
            if self._verify and _sha256(content) != self._files[path].sha256:
                raise self._changed(path)
        return content

    def begin(
        self,
        used: Collection[str],
        mapped: Mapping[str, memoryview],
        digest: DigestPieces | None = None,
        others: Collection[str] = (),
    ) -> None:
        """Start to verify the large files on other threads; `finish` ends this. Does nothing without `verify`.

        The contents of `used` are kept for `read`. mapped: views of mapped files, which are hashed in place: piece by
        piece if the manifest has digests of pieces, else as a whole. digest: computes BLAKE3 digests of pieces; None: a
        file with such digests is hashed as a whole. others: files that other processes use and verify.
        """
        self._used = frozenset(used)
        self._compared = {path: entry for path, entry in self._files.items() if path not in others}
        parts: list[Part] = []
        for path, entry in sorted(self._compared.items(), key=lambda item: -item[1].size) if self._verify else ():
            if path in mapped:
                parts += self._mapped_parts(path, mapped[path], digest)
            elif entry.size > _LARGE:
                parts.append((path, partial(self._is_same, path)))
        self._begun = {path for path, _ in parts}
        self._comparison = Comparison(parts)

    def finish(self) -> None:
        """Raise EngineFormatError for the first file (by path) whose digest differs; does nothing without `verify`.

        Verifies the small files in this thread, then helps with the large ones.
        """
        if not self._verify or self._comparison is None:
            return
        comparison, self._comparison = self._comparison, None
        with self._container.reading() as read:
            wrong = {path for path in self._compared.keys() - self._begun if not self._is_same(path, read)}
        wrong |= comparison.finish() | {pieces.path for pieces in self._pieces if not pieces.are_same()}
        if wrong:
            raise self._changed(min(wrong))

    def drop(self) -> None:
        """Stop verifying: the mapped files are not needed any more."""
        comparison, self._comparison = self._comparison, None
        for pieces in self._pieces:
            pieces.drop()
        if comparison is not None:
            comparison.drop()

    def _mapped_parts(self, path: str, content: memoryview, digest: DigestPieces | None) -> list[Part]:
        """The parts of a mapped file to verify: its pieces, all full except the last, or the whole file."""
        entry = self._files[path]
        wanted = entry.pieces
        if not (len(wanted) - 1) * PIECE < len(content) <= len(wanted) * PIECE or (
            entry.hash == "blake3" and not digest
        ):
            return [(path, lambda: _sha256(content) == entry.sha256)]
        if digest and entry.hash == "blake3":
            pieces = _Pieces(path, content, wanted, digest)
            self._pieces.append(pieces)
            return [(path, pieces.work)] * len(allowed_cores())

        def same(at: int) -> bool:
            return _sha256(content[at * PIECE : (at + 1) * PIECE]) == wanted[at]

        return [(path, partial(same, at)) for at in range(len(wanted))]

    def _is_same(self, path: str, read: Callable[[str], bytes] | None = None) -> bool:
        """Whether a file has its sha256. read: a function that reads many files of the container; None: read it
        alone."""
        content = read(path) if read is not None and path not in self._shared else self._place(path).read(path)
        if path in self._used:
            self._contents[path] = content
        return _sha256(content) == self._files[path].sha256

    def _changed(self, path: str) -> EngineChangedError:
        place = self._shared.get(path)
        named = path if place is None else f"{place.path / path}, in the base of this delta,"
        return EngineChangedError(f"{named} has changed: its sha256 is not the one in {MANIFEST_FILE}", _HINT)


class _Pieces:
    """The pieces of a mapped file. All threads that call `work` share them and do not wait for the GIL between
    pieces."""

    def __init__(self, path: str, content: memoryview, wanted: list[str], digest: DigestPieces) -> None:
        self.path, self._content, self._wanted, self._digest = path, content, wanted, digest
        self._following, self._found = c_int64(), (c_char * (32 * len(wanted)))()

    def work(self) -> bool:
        """Compute digests of pieces until none is left; always True. They are compared when all threads are done."""
        self._digest(self._content, PIECE, self._following, self._found)
        return True

    def drop(self) -> None:
        """Begin no other piece."""
        self._following.value = len(self._wanted)

    def are_same(self) -> bool:
        return self._found.raw.hex() == "".join(self._wanted)


def _sha256(content: bytes | memoryview) -> str:
    return hashlib.sha256(content).hexdigest()

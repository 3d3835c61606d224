"""The files of an engine directory: what was hashed is what is used, whoever replaces a file in between."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

from ..errors import EngineFormatError
from .manifest import FileEntry
from .verify import MANIFEST_FILE

_CHUNK = 4 << 20  # bytes read at a time while hashing
_HINT = "copy the engine again from where it was made, or compile the model again"


class EngineFiles:
    """Opens and reads the files that a manifest lists; paths are those of the manifest, relative to `root`.

    With `verify`, whatever `read` returns has the sha256 of the manifest, and so has a stream that `check` was given.
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

    def read(self, path: str) -> bytes:
        """The content of a file. EngineFormatError if it has changed."""
        content = self._contents.pop(path, None)
        if content is None:
            content = self._read(path)
            if self._verify and hashlib.sha256(content).hexdigest() != self._files[path].sha256:
                raise _changed(path)
        return content

    def check(self, used: Collection[str], streams: Mapping[str, BinaryIO]) -> None:
        """EngineFormatError for the first file (by path) whose sha256 differs; nothing to do without `verify`.

        The contents of `used` are kept for `read`; what is open already is hashed through its stream. One thread per
        file, largest first.
        """
        if not self._verify:
            return

        def digest(path: str) -> str:
            if path in used:
                self._contents[path] = self._read(path)
                return hashlib.sha256(self._contents[path]).hexdigest()
            if path in streams:
                return _digest(path, streams[path])
            with self.open(path) as stream:
                return _digest(path, stream)

        order = sorted(self._files, key=lambda path: -self._files[path].size)
        with ThreadPoolExecutor(min(len(order), os.cpu_count() or 1) or 1) as threads:
            digests = dict(zip(order, threads.map(digest, order), strict=True))
        for path in sorted(self._files):
            if digests[path] != self._files[path].sha256:
                raise _changed(path)

    def _read(self, path: str) -> bytes:
        with self.open(path) as stream:
            try:
                return stream.read()
            except OSError as error:
                raise _unreadable(path, error) from error


def _digest(path: str, stream: BinaryIO) -> str:
    """sha256 of a file, read in large chunks with one buffer."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(_CHUNK))
    try:
        while count := stream.readinto(buffer):  # type: ignore[attr-defined]
            digest.update(buffer[:count])
    except OSError as error:
        raise _unreadable(path, error) from error
    return digest.hexdigest()


def _changed(path: str) -> EngineFormatError:
    return EngineFormatError(f"{path} has changed: its sha256 is not the one in {MANIFEST_FILE}", _HINT)


def _unreadable(path: str, error: OSError) -> EngineFormatError:
    return EngineFormatError(f"{path} cannot be read: {error.strerror}", _HINT)

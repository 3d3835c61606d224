"""An engine as a directory of files."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from ..errors import EngineFormatError
from ..system import READ, READ_NO_LINK
from .container import NO_FILE
from .present import MANIFEST_FILE

_SMALL, _LARGE = 1 << 16, 1 << 20  # bytes; most files fit the first, which is allocated without a system call
_HINT = "copy the engine again from where it was made, or compile the model again"


class Folder:
    """An engine directory. Symbolic links are not followed."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def modified(self) -> float:
        """When its manifest was written, in seconds since 1970."""
        return (self.path / MANIFEST_FILE).stat().st_mtime

    def sizes(self) -> dict[str, int]:
        """The size in bytes of each file below the directory."""
        found: dict[str, int] = {}
        folders = [""]  # relative to the root, with a trailing slash
        while folders:
            below = folders.pop()
            for entry in _entries(self.path / below):
                name = below + entry.name
                if entry.is_dir(follow_symlinks=False):
                    folders.append(f"{name}/")
                else:
                    plain = entry.is_file(follow_symlinks=False)
                    found[name] = entry.stat(follow_symlinks=False).st_size if plain else NO_FILE
        return found

    def size(self, name: str) -> int:
        """The size of a file in bytes. EngineFormatError if it is missing."""
        try:
            return (self.path / name).stat(follow_symlinks=False).st_size
        except OSError as error:
            raise _unreadable(name, error) from error

    def read(self, name: str) -> bytes:
        """The content of a file."""
        return _content(name, self.path / name)

    def map(self, name: str) -> memoryview:
        """A view of a mapped file. EngineFormatError if it is missing or empty."""
        try:
            with _opened(self.path / name) as stream:
                return memoryview(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ))
        except (OSError, ValueError) as error:  # ValueError: the file is empty
            raise EngineFormatError(f"{name} cannot be mapped: {error}", _HINT) from error

    @contextmanager
    def reading(self) -> Iterator[Callable[[str], bytes]]:
        """`read` relative to an open descriptor of the directory, which is cheaper."""
        if os.open not in os.supports_dir_fd:
            yield self.read
            return
        folder = os.open(self.path, READ | os.O_DIRECTORY)
        try:
            yield lambda name: _content(name, name, folder)
        finally:
            os.close(folder)


def _opened(path: Path) -> BinaryIO:
    return open(os.open(path, READ_NO_LINK), "rb", buffering=0)


def _content(name: str, place: Path | str, folder: int | None = None) -> bytes:
    """The content of a file. folder: a descriptor of the directory that `place` is relative to; None: the current
    one."""
    try:
        descriptor = os.open(place, READ_NO_LINK, dir_fd=folder)
        try:
            pieces: list[bytes] = []
            while piece := os.read(descriptor, _LARGE if pieces else _SMALL):
                pieces.append(piece)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise _unreadable(name, error) from error
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _unreadable(name: str, error: OSError) -> EngineFormatError:
    return EngineFormatError(f"{name} cannot be read: {error.strerror}", _HINT)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """The entries of a folder; none if it cannot be read, so that its files count as missing."""
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []

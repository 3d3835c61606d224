"""Where the files of an engine lie: named byte ranges of a directory or of one file. Nothing above asks which."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import BinaryIO, Protocol

from ..errors import EngineFormatError
from ..system import READ, READ_NO_LINK
from .present import MANIFEST_FILE, is_engine

NO_FILE = -1  # in place of a size: a link, a device or the like
_SMALL, _LARGE = 1 << 16, 1 << 20  # bytes; most files are smaller than the first, room for which costs no system call
_HINT = "copy the engine again from where it was made, or compile the model again"


class Container(Protocol):
    """The named byte ranges of an engine; names are the paths of the manifest."""

    @property
    def path(self) -> Path:
        """The engine, as the user gave it."""
        ...

    @property
    def modified(self) -> float:
        """When it was written, in seconds since 1970."""
        ...

    def sizes(self) -> dict[str, int]:
        """Bytes by name of all that is there; NO_FILE for what is no plain file."""
        ...

    def size(self, name: str) -> int:
        """Bytes of one of them. EngineFormatError if there is none of that name."""
        ...

    def read(self, name: str) -> bytes:
        """A copy of a range. EngineFormatError if there is none of that name, or it cannot be read."""
        ...

    def map(self, name: str) -> memoryview:
        """A range, read-only and not copied, valid as long as the view is. EngineFormatError as for `read`."""
        ...

    def reading(self) -> AbstractContextManager[Callable[[str], bytes]]:
        """`read` for many ranges, which costs less for each."""
        ...


class Folder:
    """An engine directory. No link is followed."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def modified(self) -> float:
        """When its manifest was written."""
        return (self.path / MANIFEST_FILE).stat().st_mtime

    def sizes(self) -> dict[str, int]:
        """Bytes of each file below the directory."""
        found: dict[str, int] = {}
        folders = [""]  # below the root, with the slash behind
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
        """Bytes of a file."""
        try:
            return (self.path / name).stat(follow_symlinks=False).st_size
        except OSError as error:
            raise _unreadable(name, error) from error

    def read(self, name: str) -> bytes:
        """The content of a file."""
        return _content(name, self.path / name)

    def map(self, name: str) -> memoryview:
        """A file, mapped."""
        try:
            with _opened(self.path / name) as stream:
                return memoryview(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ))
        except (OSError, ValueError) as error:  # ValueError: the file is empty
            raise EngineFormatError(f"{name} cannot be mapped: {error}", _HINT) from error

    @contextmanager
    def reading(self) -> Iterator[Callable[[str], bytes]]:
        """`read` by a descriptor of the directory."""
        if os.open not in os.supports_dir_fd:
            yield self.read
            return
        folder = os.open(self.path, READ | os.O_DIRECTORY)
        try:
            yield lambda name: _content(name, name, folder)
        finally:
            os.close(folder)


def open_container(path: Path) -> Container:
    """What an engine lies in, or one target of an engine. EngineFormatError for a file that is damaged; a directory is
    not looked at, but for whether it is within an engine."""
    place = path.absolute()
    if is_engine(place.parent):
        from .targets import TargetFiles, targets_in

        whole = open_container(place.parent)
        if (targets := targets_in(whole)) is not None:
            return TargetFiles(whole, targets, place.name)
    if path.is_file():
        from .one_file import OneFile

        return OneFile(path)
    return Folder(path)


def _opened(path: Path) -> BinaryIO:
    return open(os.open(path, READ_NO_LINK), "rb", buffering=0)


def _content(name: str, place: Path | str, folder: int | None = None) -> bytes:
    """All of a file; folder: a descriptor of the directory that `place` is relative to."""
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
    """What is in a folder; nothing in one that cannot be read, so that its files are missing."""
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []

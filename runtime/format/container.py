"""Access to the files of an engine, whether it is a directory or one file: callers see named byte ranges."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

NO_FILE = -1  # the size of anything but a plain file: a link, a device or the like


class Container(Protocol):
    """The named byte ranges of an engine; names are the paths of the manifest."""

    @property
    def path(self) -> Path:
        """The engine's path, as the user gave it."""
        ...

    @property
    def modified(self) -> float:
        """When the engine was written, in seconds since 1970."""
        ...

    def sizes(self) -> dict[str, int]:
        """The size in bytes of each file by name; NO_FILE for anything but a plain file."""
        ...

    def size(self, name: str) -> int:
        """The size in bytes of a file. EngineFormatError if there is no file of that name."""
        ...

    def read(self, name: str) -> bytes:
        """A copy of a file's bytes. EngineFormatError if there is no file of that name, or if it cannot be read."""
        ...

    def map(self, name: str) -> memoryview:
        """A read-only view of a file's bytes, not copied, valid as long as the view exists. EngineFormatError as for
        `read`."""
        ...

    def reading(self) -> AbstractContextManager[Callable[[str], bytes]]:
        """A context that gives a cheaper `read`, for reading many files."""
        ...

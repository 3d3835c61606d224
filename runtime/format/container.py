"""Where the files of an engine lie: named byte ranges of a directory or of one file. Nothing above asks which."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

NO_FILE = -1  # in place of a size: a link, a device or the like


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
        """Bytes of each file by name; NO_FILE for anything but a plain file."""
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

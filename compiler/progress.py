"""How a compile tells what it is doing: an interface, and the one that says nothing."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from .errors import OutOfMemory


class Reporter:
    """Hears of stages, of progress within them, and of warnings; times the stages."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """A named part of the compile; OutOfMemory where memory ran out in it."""
        start = time.perf_counter()
        self.enter(name)
        try:
            yield
        except (MemoryError, RuntimeError) as error:
            if not _is_memory(error):
                raise
            raise OutOfMemory(name, " ".join(str(error).split())[:200]) from error
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
        self.leave(name, self.seconds[name])

    def enter(self, name: str) -> None:
        """A stage begins."""

    def leave(self, name: str, seconds: float) -> None:
        """A stage has ended well."""

    def progress(self, text: str, done: int, total: int) -> None:
        """`done` of `total` steps of the current stage are done; the next is `text`."""

    def warn(self, text: str) -> None:
        """Something that the user should know."""


class SilentReporter(Reporter):
    """For calls from Python: times the stages, prints nothing."""


def _is_memory(error: Exception) -> bool:
    """Whether an error says that memory ran out; torch's allocators say it in a RuntimeError."""
    text = str(error)
    return isinstance(error, MemoryError) or "can't allocate memory" in text or "out of memory" in text

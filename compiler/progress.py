"""How a compile tells what it is doing: an interface, and the one that says nothing."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


class Reporter:
    """Hears of stages, of progress within them, and of warnings; times the stages."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """A named part of the compile."""
        start = time.perf_counter()
        self.enter(name)
        yield
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

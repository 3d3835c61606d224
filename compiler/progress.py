"""Progress reports of a compile: the interface, and the reporter for calls from Python."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType

from ..runtime.progress.estimate import TimeEstimate
from .errors import OutOfMemory

log = logging.getLogger("icc.compile")


class Reporter:
    """Receives stages, progress within them, and warnings; times the stages. A context manager."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def __enter__(self) -> Reporter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Called when the compile has ended, with or without an error."""

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """A named part of the compile; OutOfMemory if memory runs out in it."""
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
        """Called when a stage begins."""

    def leave(self, name: str, seconds: float) -> None:
        """Called when a stage has ended without an error."""

    def progress(self, text: str, done: int, total: int) -> None:
        """Called when `done` of `total` of the current stage is done, in units of its cost; `text` names the current
        work."""

    def warn(self, text: str) -> None:
        """Called with a warning for the user."""


@dataclass(frozen=True)
class CompileProgress:
    """The progress of a compile: its stage, the current work, the share of the stage that is done (0 to 1, None: not
    known), the seconds that the stage has taken, and those that it may still take (None: not known)."""

    stage: str
    text: str
    share: float | None
    elapsed_s: float
    left_s: float | None


class LoggingReporter(Reporter):
    """The reporter for calls from Python: it sends stages and warnings to the logger "icc.compile", and progress to
    `heard` if it is given."""

    def __init__(self, heard: Callable[[CompileProgress], object] | None = None) -> None:
        super().__init__()
        self._heard = heard
        self._stage, self._estimate = "", TimeEstimate(time.monotonic())

    def enter(self, name: str) -> None:
        log.debug("%s begins", name)
        self._stage, self._estimate = name, TimeEstimate(time.monotonic())
        self._tell("")

    def leave(self, name: str, seconds: float) -> None:
        log.info("%s took %.1f s", name, seconds)

    def progress(self, text: str, done: int, total: int) -> None:
        self._estimate.update(done, total, time.monotonic())
        self._tell(text)

    def warn(self, text: str) -> None:
        log.warning("%s", text)

    def _tell(self, text: str) -> None:
        if self._heard is not None:
            now = time.monotonic()
            left = self._estimate.left(now)
            elapsed = now - self._estimate.start
            self._heard(CompileProgress(self._stage, text, self._estimate.share, elapsed, left))


def _is_memory(error: Exception) -> bool:
    """Whether an error means that memory ran out; torch's allocators raise a RuntimeError for that."""
    text = str(error)
    return isinstance(error, MemoryError) or "can't allocate memory" in text or "out of memory" in text

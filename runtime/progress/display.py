"""Display: shows what a command is doing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import TracebackType

from .estimate import TimeEstimate, clock, rounded

_NAME_CHARS = 60


class Display:
    """Shows one stage of work after the other. A context manager; this base class shows nothing.

    `update` may be called from any thread, as often as wanted.
    """

    def __enter__(self) -> Display:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def enter(self, stage: str) -> None:
        """Begin a stage."""

    def update(self, text: str, done: float, total: float) -> None:
        """Report that `done` of `total` of the stage is done, in units of cost; text: the current item."""

    def leave(self, stage: str) -> None:
        """End a stage."""

    def say(self, text: str) -> None:
        """Print a line that stays."""

    def close(self) -> None:
        """Stop showing anything."""

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[Callable[[str, float, float], None]]:
        """A stage as a context, which gives `update`."""
        self.enter(name)
        try:
            yield self.update
        finally:
            self.leave(name)


def status(estimate: TimeEstimate, left: float | None, now: float) -> str:
    """A text such as `42 %, 1:05 elapsed, about 1:30 left`, without unknown parts. left, now: seconds; None: not
    known."""
    parts = [] if estimate.share is None else [f"{100 * estimate.share:.0f} %"]
    parts.append(f"{clock(now - estimate.start)} elapsed")
    if left is not None:
        parts.append(f"about {clock(rounded(left))} left")
    return ", ".join(parts)


def shortened(text: str, most: int = _NAME_CHARS) -> str:
    """A name, with its middle cut out if it is longer than `most` characters: both ends distinguish it from others."""
    if len(text) <= most:
        return text
    head = (most - 1) // 2
    return f"{text[:head]}…{text[len(text) - (most - 1 - head) :]}"

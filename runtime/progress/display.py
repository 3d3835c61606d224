"""Display: what a command is doing, for whoever waits for it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import TracebackType

from .estimate import TimeEstimate, clock, rounded

_NAME_CHARS = 60


class Display:
    """One stage of work after the other. A context manager; this one shows nothing.

    `update` may be called from any thread, as often as wanted.
    """

    def __enter__(self) -> Display:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def enter(self, stage: str) -> None:
        """A stage begins."""

    def update(self, text: str, done: float, total: float) -> None:
        """`done` of `total`, counted by what it costs, is done of the stage; what is worked on is `text`."""

    def leave(self, stage: str) -> None:
        """A stage has ended."""

    def say(self, text: str) -> None:
        """A line that stays."""

    def close(self) -> None:
        """Nothing is shown any more."""

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[Callable[[str, float, float], None]]:
        """A stage as a block, which gets `update`."""
        self.enter(name)
        try:
            yield self.update
        finally:
            self.leave(name)


def status(estimate: TimeEstimate, left: float | None, now: float) -> str:
    """`42 %, 1:05 elapsed, about 1:30 left`, as far as it is known. left, now: seconds; None: not known."""
    parts = [] if estimate.share is None else [f"{100 * estimate.share:.0f} %"]
    parts.append(f"{clock(now - estimate.start)} elapsed")
    if left is not None:
        parts.append(f"about {clock(rounded(left))} left")
    return ", ".join(parts)


def shortened(text: str, most: int = _NAME_CHARS) -> str:
    """A name without its middle if it is long: both its ends tell it from others."""
    if len(text) <= most:
        return text
    head = (most - 1) // 2
    return f"{text[:head]}…{text[len(text) - (most - 1 - head) :]}"

"""Whether what should end soon does end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread
from time import monotonic


class Watchdog:
    """Calls `late` from a thread of its own where something that is watched has not ended within `seconds`."""

    def __init__(self, seconds: float, late: Callable[[], None]) -> None:
        self._seconds, self._late = seconds, late
        self._since: float | None = None
        self._closed = Event()
        Thread(target=self._look, daemon=True, name="icc-watchdog").start()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """What runs in here is watched; one thing at a time."""
        self._since = monotonic()
        try:
            yield
        finally:
            self._since = None

    def _look(self) -> None:
        while not self._closed.wait(self._seconds / 10):
            since = self._since
            if since is not None and monotonic() - since > self._seconds:
                self._since = None
                self._late()

    def close(self) -> None:
        """Watch no more."""
        self._closed.set()

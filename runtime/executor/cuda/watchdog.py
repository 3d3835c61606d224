"""Detects work that does not end in time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread
from time import monotonic


class Watchdog:
    """Calls `late` from its own thread if watched work has not ended within `seconds`."""

    def __init__(self, seconds: float, late: Callable[[], None]) -> None:
        self._seconds, self._late = seconds, late
        self._since: float | None = None
        self._closed = Event()
        Thread(target=self._look, daemon=True, name="icc-watchdog").start()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """A context whose body is watched; only one at a time."""
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
        """Stop watching."""
        self._closed.set()

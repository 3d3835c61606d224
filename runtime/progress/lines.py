"""Lines: progress without a terminal, one line every ten seconds."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from typing import TextIO

from .display import Display, shortened, status
from .estimate import TimeEstimate

EVERY_S = 10.0


class LineDisplay(Display):
    """Prints a line every ten seconds, for logs and pipes. clock: gives seconds; tests replace it."""

    def __init__(self, stream: TextIO, every_s: float = EVERY_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._every_s, self._clock = stream, every_s, clock
        self._lock = threading.Lock()
        self._stage, self._text = "", ""
        self._estimate = TimeEstimate(clock())
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> LineDisplay:
        self._thread.start()
        return self

    def enter(self, stage: str) -> None:
        with self._lock:
            self._stage, self._text, self._estimate = stage, "", TimeEstimate(self._clock())

    def update(self, text: str, done: float, total: float) -> None:
        with self._lock:
            self._text = text
            self._estimate.update(done, total, self._clock())

    def leave(self, stage: str) -> None:
        with self._lock:
            self._stage = ""

    def say(self, text: str) -> None:
        with self._lock:
            print(text, file=self._stream, flush=True)

    def tick(self) -> None:
        """Write the current line, if there is anything to report."""
        with self._lock:
            now = self._clock()
            left = self._estimate.left(now)
            if self._stage:
                shown = status(self._estimate, left, now)
                text = f": {shortened(self._text)}" if self._text else ""
                print(f"{self._stage:<9} {shown}{text}", file=self._stream, flush=True)

    def close(self) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def running(self) -> bool:
        """Whether lines are written automatically."""
        return self._thread.is_alive()

    def _run(self) -> None:
        steps = max(round(self._every_s), 1)
        for number in itertools.count(1):
            if self._ended.wait(self._every_s / steps):
                return
            if number % steps == 0:
                self.tick()
            else:  # updates the estimate, which depends on the time
                with self._lock:
                    self._estimate.left(self._clock())

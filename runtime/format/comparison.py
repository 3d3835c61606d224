"""Compares large files with their digests in threads, while the process prepares the rest."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from threading import Thread

from ..system import allowed_cores

Part = tuple[str, Callable[[], bool]]  # a path, and a function: whether a part of that file matches its digest


class Comparison:
    """Compares parts of files in threads: on all cores but one at once, and on the last one in `finish`.

    The parts should release the GIL for most of their time.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts, self._wrong = deque(parts), set[str]()
        self._errors: list[BaseException] = []
        count = min(len(parts), len(allowed_cores()) - 1)
        self._threads = [Thread(target=self._work, daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def finish(self) -> set[str]:
        """Wait for all parts; the paths of the files that differ. An exception of a part is raised here."""
        self._work()
        for thread in self._threads:
            thread.join()
        if self._errors:
            raise self._errors[0]
        return self._wrong

    def drop(self) -> None:
        """Stop: begin no other part, and wait for those in progress."""
        self._parts.clear()
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while True:
            try:
                path, same = self._parts.popleft()
            except IndexError:
                return
            try:
                if not same():
                    self._wrong.add(path)
            except Exception as error:  # raised by `finish`
                self._errors.append(error)

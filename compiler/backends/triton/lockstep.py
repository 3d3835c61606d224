"""Runs kernels of several ranks in Triton's interpreter, where each may wait for work of another.

The interpreter runs one program at a time and stores the number of one program. Every rank gets a thread; one thread
runs at a time and yields at each atomic of its program, by which a program also waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Condition, Thread
from types import SimpleNamespace
from typing import Any

Choose = Callable[[Sequence[int]], int]
_PATIENCE = 100_000


class StuckError(Exception):
    """All ranks wait for each other, or for a rank that has ended."""


def next_one(ready: Sequence[int]) -> int:
    """The first rank in `ready`, the ranks that have not ended."""
    return ready[0]


class Lockstep:
    """Runs the work of ranks interleaved. choose: picks the rank that continues from those that have not ended; the one
    that has just run is the last of them. patience: StuckError is raised after this many successive atomics without any
    rank's end."""

    def __init__(self, choose: Choose = next_one) -> None:
        self._choose, self._changed, self.patience = choose, Condition(), _PATIENCE
        self._ready: list[int] = []
        self._now = self._counts = 0
        self._error: BaseException | None = None

    def run(self, works: Sequence[Callable[[], None]]) -> None:
        """Run each rank's work until all have ended. Raises the first error of any rank."""
        self._ready, self._counts, self._error = list(range(len(works))), 0, None
        self._now = self._choose(self._ready)
        threads = [Thread(target=self._work, args=pair, daemon=True) for pair in enumerate(works)]
        with self._giving_way():
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        if self._error is not None:
            raise self._error

    @property
    def running(self) -> int:
        """The rank that is running."""
        return self._now

    def give_way(self, rank: int | None = None) -> None:
        """Let other ranks run until this one is chosen again. rank: the calling rank; None: the one that is running."""
        with self._changed:
            if rank is None:
                rank = self._now
            self._counts += 1
            if self._counts > self.patience:
                self._fail(StuckError(f"no rank ends: {self._ready} wait"))
            self._ready = [*(other for other in self._ready if other != rank), rank]
            self._pass_on()
            self._await(rank)

    def _work(self, rank: int, work: Callable[[], None]) -> None:
        try:
            with self._changed:
                self._await(rank)
            work()
        except BaseException as error:
            self._error = self._error or error
        with self._changed:
            self._ready.remove(rank)
            self._counts = 0
            self._pass_on()

    def _await(self, rank: int) -> None:
        self._changed.wait_for(lambda: self._now == rank or self._error is not None)
        if self._error is not None:
            raise self._error

    def _pass_on(self) -> None:
        if self._ready:
            self._now = self._choose(self._ready)
        self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        self._error = self._error or error
        self._changed.notify_all()
        raise self._error

    @contextmanager
    def _giving_way(self) -> Iterator[None]:
        """Let another rank run before every atomic, and restore the interpreter's state of this rank's program
        afterwards."""
        import triton.runtime.interpreter as interpreter

        native, builder = interpreter._interpreter, interpreter.interpreter_builder  # type: ignore[attr-defined]

        def atomic_rmw(*args: Any) -> Any:
            place = builder.grid_idx, builder.grid_dim, builder.options
            self.give_way()
            builder.grid_idx, builder.grid_dim, builder.options = place
            return native.atomic_rmw(*args)

        names = (name for name in dir(native) if not name.startswith("__"))
        interpreter._interpreter = SimpleNamespace(  # type: ignore[attr-defined]
            **{name: getattr(native, name) for name in names} | {"atomic_rmw": atomic_rmw}
        )
        try:
            yield
        finally:
            interpreter._interpreter = native  # type: ignore[attr-defined]

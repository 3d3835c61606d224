"""AdapterTable: loads and unloads adapters for the HTTP process, in a thread beside the steps."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import IccError, RequestError
from ...loop.driver import NO_ROOM
from .messages import AdapterDone, AdapterStats, Failed, LoadAdapter, UnloadAdapter

if TYPE_CHECKING:
    from ...adapters.resident import ResidentAdapters

log = logging.getLogger("icc.engine")
_TELL_S = 0.25


class AdapterTable:
    """Takes requests to load or unload adapters, and returns their answers once they are done. adapters: None for an
    engine that holds no adapters."""

    def __init__(self, adapters: ResidentAdapters | None) -> None:
        self._adapters = adapters
        self._thread = ThreadPoolExecutor(1, "icc-load-adapter")
        self._open: list[tuple[int, Future[None]]] = []
        self._told = 0.0

    @property
    def busy(self) -> bool:
        """Whether an answer is outstanding."""
        return bool(self._open)

    def stats(self, awaited: Iterable[str]) -> AdapterStats | None:
        """The adapters in memory, and those that requests wait for. None if the last call was less than _TELL_S seconds
        ago, or if the engine holds no adapters. awaited: names."""
        now = time.monotonic()
        if self._adapters is None or now - self._told < _TELL_S:
            return None
        self._told = now
        return AdapterStats(self._adapters.plan.slots, self._adapters.resident, list(dict.fromkeys(awaited)))

    def ask(self, question: LoadAdapter | UnloadAdapter) -> None:
        """Queue a request; requests run one after the other."""
        self._open.append((question.id, self._thread.submit(self._do, question)))

    def answers(self) -> Iterator[AdapterDone | Failed]:
        """The answers of requests that have ended, in order."""
        while self._open and self._open[0][1].done():
            number, done = self._open.pop(0)
            error = done.exception()
            if error is None:
                yield AdapterDone(number)
                continue
            if not isinstance(error, IccError):
                log.error("an adapter could not be loaded", exc_info=error)
            message = error.message if isinstance(error, IccError) else "the adapter could not be loaded"
            hint = f": {error.hint}" if isinstance(error, IccError) and error.hint else ""
            status = 404 if self._adapters is None else 400  # as for all features not compiled in
            yield Failed(number, status if isinstance(error, IccError) else 500, message + hint, "lora_path")

    def _do(self, question: LoadAdapter | UnloadAdapter) -> None:
        if self._adapters is None:
            raise RequestError(NO_ROOM, "compile the model with --adapters 8x16")
        if isinstance(question, UnloadAdapter):
            self._adapters.remove(question.name)
        else:
            self._adapters.add(question.name, Path(question.path))

"""Guessing: a speculator as the engine loop sees it, which may be absent, have nothing to do for a while, or fail."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from ..batch.scheduled import Draft, ScheduledBatch, StepOutcome
from ..requests.generation import Generation
from .speculator import Speculator


class Guessing:
    """Asks the speculator before a step and tells it after. Resting, it does next to nothing: that is the lot of most
    steps of a request without luck. A speculator that fails is not asked again: it changes no token, so that nobody
    needs to end by it. `on_fault` gets the exception."""

    def __init__(self, speculator: Speculator | None, vocab_size: int, on_fault: Callable[[Exception], object]) -> None:
        self.speculator = speculator
        self._vocab_size = vocab_size
        self._on_fault = on_fault
        self._rest = self._rested = 0  # steps that the speculator has no part in: to come, and since it was last asked

    def drafts(self, decoding: Sequence[int], generations: Mapping[int, Generation]) -> dict[int, Draft]:
        """Guesses for the requests that decode."""
        if self.speculator is None or self._rest:
            return {}
        try:
            drafts = self.speculator.drafts(decoding, generations)
        except Exception as error:
            self._stop(error)
            return {}
        return {i: d for i, d in drafts.items() if 0 <= min(d.token_ids) and max(d.token_ids) < self._vocab_size}

    def learn(
        self, batch: ScheduledBatch, outcomes: Sequence[StepOutcome], rows: Mapping[int, int] | None, start: float
    ) -> None:
        """A step that began at `start` has ended. rows: the logit row behind the newest token of each request that goes
        on, as long as the device has it."""
        if self.speculator is None:
            return
        if self._rest > 1:
            self._rest -= 1
            self._rested += 1
            return
        seconds = time.perf_counter() - start
        try:
            if self._rest:
                self.speculator.plain(batch, outcomes, seconds)
                self._rested += 1
                self.wake()
            else:
                self.speculator.settle(batch, outcomes, seconds)
                if rows is not None:
                    self.speculator.observe(rows)
                self._rest = self.speculator.rest
        except Exception as error:
            self._stop(error)

    def wake(self) -> None:
        """There are other requests, or the rest is over."""
        if self.speculator is not None and self._rested:
            self.speculator.skip(self._rested)
        self._rest = self._rested = 0

    def idle(self, requests: Sequence[int]) -> bool:
        """Whether none of these requests may have guesses in the next step."""
        return self._rest > 1 or self.speculator is None or self.speculator.idle(requests)

    def forget(self, request_id: int) -> None:
        """The request has ended."""
        if self.speculator is not None:
            self.wake()
            self.speculator.forget(request_id)

    def _stop(self, error: Exception) -> None:
        self._on_fault(error)
        assert self.speculator is not None
        self.speculator.drafter.close()
        self.speculator = None
        self._rest = self._rested = 0

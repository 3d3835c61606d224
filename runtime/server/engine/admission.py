"""Admission: the price of a request, and whether a bounded queue has capacity for it."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ...errors import IccError

_NEW_SHARE = 1 / 32  # weight of the newest sequence in the mean service time
_RATE_WINDOW_S = 30.0  # window of the rate at which requests end
_LOGPROB_BYTES = 100  # approximate size of one entry in an answer
_NUMBER_BYTES = 22  # approximate size of one number of a vector in an answer


class Overloaded(IccError):
    """There is no capacity now; `retry_after` is in whole seconds."""

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class TooExpensive(IccError):
    """The request exceeds the limits of the server, whatever its load."""


@dataclass(frozen=True, slots=True)
class Price:
    """The most that a request can use. sequences: completions, or vectors; tokens: of prompts and answers; bytes: of
    logprobs or vectors in the answer."""

    sequences: int
    tokens: int
    bytes: int

    @classmethod
    def of(cls, prompt_lens: Sequence[int], n: int, max_tokens: int, logprobs: int | None) -> Price:
        """The price of `n` completions of each prompt. prompt_lens, max_tokens: in tokens; logprobs: how many of the
        likeliest tokens per position, None for no log-probabilities."""
        outputs = len(prompt_lens) * n * max_tokens
        listed = 0 if logprobs is None else (outputs + sum(prompt_lens)) * (1 + logprobs)
        return cls(len(prompt_lens) * n, sum(prompt_lens) * n + outputs, listed * _LOGPROB_BYTES)

    @classmethod
    def of_embeddings(cls, prompt_lens: Sequence[int], dimension: int) -> Price:
        """The price of a vector of `dimension` numbers for each prompt. prompt_lens: in tokens."""
        return cls(len(prompt_lens), sum(prompt_lens), len(prompt_lens) * dimension * _NUMBER_BYTES)


@dataclass(frozen=True)
class Budget:
    """The most sequences and tokens of accepted requests that have not ended, and the most bytes of one request's
    answer.

    wait_s: the most seconds that a request may have to wait for its first step, as estimated; None: no limit.
    """

    sequences: int
    tokens: int
    answer_bytes: int = 64 << 20
    wait_s: float | None = None


class Admission:
    """Counts accepted requests that have not ended. slots: how many sequences run at once.

    Requests of a priority above 0, such as lines of batches, may wait without limit, and do not count towards the wait
    of others.
    """

    def __init__(self, budget: Budget, slots: Callable[[], int] = lambda: 1) -> None:
        self.budget = budget
        self.sequences = self.tokens = self.requests = 0
        self._slots = slots
        self._urgent = 0  # sequences of requests of priority 0 or less
        self._service_s = 0.0  # moving mean of the seconds that a sequence runs; 0 before any has ended
        self._ended: deque[float] = deque(maxlen=1000)

    def check_room(self) -> None:
        """Overloaded if not even the smallest request fits: checked before a request is read."""
        if self.sequences >= self.budget.sequences or self.tokens >= self.budget.tokens:
            raise Overloaded("the queue is full", self._retry_after())
        self._check_wait(1)

    def wait_s(self, sequences: int = 1) -> float:
        """The seconds that the last of `sequences` new sequences would wait, by Little's law: the number of sequences
        queued before it over the rate at which running ones end."""
        slots = max(self._slots(), 1)
        return max(self._urgent + sequences - slots, 0) * self._service_s / slots

    def _check_wait(self, sequences: int) -> None:
        most = self.budget.wait_s
        if most is not None and self._urgent and self.wait_s(sequences) > most:
            raise Overloaded("the queue is too long for --max-wait", self._retry_after())

    def served(self, seconds: float) -> None:
        """Record that a sequence ran for so many seconds, without its time in the queue."""
        self._service_s += (seconds - self._service_s) * (_NEW_SHARE if self._service_s else 1.0)

    @contextlib.contextmanager
    def admitted(self, price: Price, priority: int = 0) -> Iterator[None]:
        """Reserve a request's price in the budget for the duration of the context. Raises Overloaded or TooExpensive
        before anything is reserved."""
        budget = self.budget
        if price.bytes > budget.answer_bytes:
            raise TooExpensive("the answer would be too large: ask for fewer logprobs, tokens or inputs")
        if price.sequences > budget.sequences or price.tokens > budget.tokens:
            raise TooExpensive(
                f"the request is for {price.sequences} completions and {price.tokens} tokens, "
                f"this server takes at most {budget.sequences} and {budget.tokens} at a time"
            )
        if self.sequences + price.sequences > budget.sequences or self.tokens + price.tokens > budget.tokens:
            raise Overloaded("the queue is full", self._retry_after())
        urgent = 0 if priority > 0 else price.sequences
        if urgent:
            self._check_wait(urgent)
        self.requests += 1
        self.sequences += price.sequences
        self._urgent += urgent
        self.tokens += price.tokens
        try:
            yield
        finally:
            self.requests -= 1
            self.sequences -= price.sequences
            self._urgent -= urgent
            self.tokens -= price.tokens
            self._ended.append(time.monotonic())

    def _retry_after(self) -> int:
        """The estimated seconds until a tenth of the accepted requests has ended, from the recent rate."""
        now = time.monotonic()
        recent = sum(1 for at in self._ended if now - at < _RATE_WINDOW_S)
        rate = recent / _RATE_WINDOW_S
        return max(1, min(60, round(self.requests / 10 / rate))) if rate else 5

"""Admission: what a request costs, and whether there is room for it in a bounded queue."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ...errors import IccError

_NEW_SHARE = 1 / 32  # of the newest sequence in the mean service time
_RATE_WINDOW_S = 30.0  # over which the rate of ended requests is taken
_LOGPROB_BYTES = 100  # about what one entry takes in an answer
_NUMBER_BYTES = 22  # of one number of a vector there


class Overloaded(IccError):
    """No room now; `retry_after` is in whole seconds."""

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class TooExpensive(IccError):
    """No room ever: the request is beyond what the server takes at all."""


@dataclass(frozen=True, slots=True)
class Price:
    """What a request may take. sequences: completions, or vectors; tokens: of prompts and answers; bytes: of logprobs
    or vectors in the answer."""

    sequences: int
    tokens: int
    bytes: int

    @classmethod
    def of(cls, prompt_lens: Sequence[int], n: int, max_tokens: int, logprobs: int | None) -> Price:
        """The most that `n` completions of each prompt can take. prompt_lens, max_tokens: in tokens; logprobs: of how
        many of the likeliest tokens per position, None for none."""
        outputs = len(prompt_lens) * n * max_tokens
        listed = 0 if logprobs is None else (outputs + sum(prompt_lens)) * (1 + logprobs)
        return cls(len(prompt_lens) * n, sum(prompt_lens) * n + outputs, listed * _LOGPROB_BYTES)

    @classmethod
    def of_embeddings(cls, prompt_lens: Sequence[int], dimension: int) -> Price:
        """What the vectors of so many prompts take, each of `dimension` numbers."""
        return cls(len(prompt_lens), sum(prompt_lens), len(prompt_lens) * dimension * _NUMBER_BYTES)


@dataclass(frozen=True)
class Budget:
    """Most sequences and tokens that are accepted and have not ended, and most bytes of one request's answer.

    wait_s: most seconds that a request may have to wait for its first step, as far as that can be told; None: any time.
    """

    sequences: int
    tokens: int
    answer_bytes: int = 64 << 20
    wait_s: float | None = None


class Admission:
    """Counts what is accepted and has not ended. slots: how many sequences run at once.

    Requests of a priority above 0, such as the lines of batches, wait for as long as it takes, and nobody waits for
    them.
    """

    def __init__(self, budget: Budget, slots: Callable[[], int] = lambda: 1) -> None:
        self.budget = budget
        self.sequences = self.tokens = self.requests = 0
        self._slots = slots
        self._urgent = 0  # sequences that give way to nobody
        self._service_s = 0.0  # that a sequence runs, a moving mean; 0 before any has ended
        self._ended: deque[float] = deque(maxlen=1000)

    def check_room(self) -> None:
        """Overloaded if not even the smallest request fits: that can be told before a request is looked at."""
        if self.sequences >= self.budget.sequences or self.tokens >= self.budget.tokens:
            raise Overloaded("the queue is full", self._retry_after())
        self._check_wait(1)

    def wait_s(self, sequences: int = 1) -> float:
        """How long the last of so many further sequences would wait, by Little's law: those that stand in line before
        it, over the rate at which as many as run at once come to their end."""
        slots = max(self._slots(), 1)
        return max(self._urgent + sequences - slots, 0) * self._service_s / slots

    def _check_wait(self, sequences: int) -> None:
        most = self.budget.wait_s
        if most is not None and self._urgent and self.wait_s(sequences) > most:
            raise Overloaded("the queue is too long for --max-wait", self._retry_after())

    def served(self, seconds: float) -> None:
        """A sequence that ran to its end took so long, without the time that it waited."""
        self._service_s += (seconds - self._service_s) * (_NEW_SHARE if self._service_s else 1.0)

    @contextlib.contextmanager
    def admitted(self, price: Price, priority: int = 0) -> Iterator[None]:
        """Hold the room for a request while it lasts. Raises Overloaded or TooExpensive before anything is taken."""
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
        """Seconds until about a tenth of what is accepted will have ended, from how fast requests ended lately."""
        now = time.monotonic()
        recent = sum(1 for at in self._ended if now - at < _RATE_WINDOW_S)
        rate = recent / _RATE_WINDOW_S
        return max(1, min(60, round(self.requests / 10 / rate))) if rate else 5

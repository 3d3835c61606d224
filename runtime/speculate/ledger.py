"""When guessing pays: what steps cost, and an account per request that is never overdrawn.

The unit of account is one token of plain decoding. A step with guesses takes longer than one without; that is charged
to the requests that guess, each by its share of the guesses. An accepted guess is a token earned. Drafting stops where
the account does not hold what the next draft would cost, so a request that never accepts costs at most its CREDIT and
the ALLOWANCE of each step, together within 3 % of a hundred tokens, and in a batch so large that guesses cost more than
they earn every account runs dry.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

CREDIT = 1.0  # tokens that a new request may lose
ALLOWANCE = 0.01  # tokens per step
MOST_SAVED = 8.0  # tokens: what a request has won is no licence to lose it all again
MEMORY = 0.15  # weight of the newest draft in a request's rate
LONGEST_PAUSE = 256  # steps between two probes of a request whose guesses are wrong
SLOPE = 0.04  # of a plain step per guess, until steps with guesses have been timed


class StepTimes:
    """How long a step takes by its number of tokens, from the steps so far; with guesses, drafting included."""

    def __init__(self, slope: float = SLOPE) -> None:
        self._plain, self._guessed = Curve(slope), Curve(slope)

    def record(self, decodes: int, guesses: int, seconds: float) -> None:
        """A step of one token of each of `decodes` requests, and guesses, took `seconds`."""
        (self._guessed if guesses else self._plain).record(decodes + guesses, seconds)

    def charge(self, decodes: int, guesses: int) -> float:
        """What the guesses of a step cost: tokens that its `decodes` requests would have got in the time they add."""
        curve = self._guessed if self._guessed.known else self._plain
        return decodes * max(curve.seconds(decodes + guesses) / self._plain.seconds(decodes) - 1, 0.0)


class Curve:
    """Seconds by tokens: measured, or between the nearest measured ones, or by a slope beyond them."""

    def __init__(self, slope: float) -> None:
        self._slope = slope
        self._seconds: dict[int, float] = {}
        self._sizes: list[int] = []

    @property
    def known(self) -> bool:
        return bool(self._sizes)

    def record(self, tokens: int, seconds: float) -> None:
        """A measured step; now and then one takes long for other reasons."""
        old = self._seconds.get(tokens)
        if old is None:
            insort(self._sizes, tokens)
            self._seconds[tokens] = seconds
        else:
            self._seconds[tokens] = old + 0.1 * (min(seconds, 2 * old) - old)

    def seconds(self, tokens: int) -> float:
        """The estimate; a step of one token takes 1 as long as nothing is known."""
        if not self._sizes:
            return 1.0 + self._slope * (tokens - 1)
        at = bisect_left(self._sizes, tokens)
        if at < len(self._sizes) and self._sizes[at] == tokens:
            return self._seconds[tokens]
        if at == 0 or at == len(self._sizes):
            nearest = self._sizes[max(at - 1, 0)]
            return self._seconds[nearest] * (1 + self._slope * tokens) / (1 + self._slope * nearest)
        low, high = self._sizes[at - 1], self._sizes[at]
        share = (tokens - low) / (high - low)
        return self._seconds[low] * (1 - share) + self._seconds[high] * share


@dataclass(slots=True)
class Account:
    """One request's account: its balance in tokens, how often its guesses are right, and how long it pauses."""

    rate: float
    balance: float = CREDIT
    misses: int = 0  # drafts in a row of which nothing was accepted
    pause: int = 0  # steps until it may draft again

    def tick(self) -> bool:
        """A step begins; whether the request may draft in it."""
        self.balance = min(self.balance + ALLOWANCE, MOST_SAVED)
        self.pause = max(self.pause - 1, 0)
        return self.pause == 0

    def settle(self, guesses: int, deepest: int, accepted: int, charge: float) -> None:
        """A draft of `guesses`, `deepest` tokens deep, was verified at this charge."""
        self.balance = min(self.balance + accepted - charge, MOST_SAVED)
        tried = min(accepted + 1, deepest)  # whatever came after the first wrong guess was not tried
        self.rate += MEMORY * min(tried, 4) / 2 * (accepted / tried - self.rate)
        self.misses = 0 if accepted else self.misses + 1
        self.pause = min(2 ** (self.misses - 1), LONGEST_PAUSE) if self.misses > 1 else 0

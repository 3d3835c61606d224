"""Decides when guessing pays: measures what steps cost, and keeps an account per request that is never overdrawn.

The unit of account is one token of plain decoding. A step with guesses takes longer than one without; the difference is
charged to the requests that guess, in proportion to their guesses, and so is the time of asking a drafter that has no
answer. An accepted guess earns one token. A request does not draft if its account cannot pay for the draft. A request
without accepted guesses therefore costs at most its CREDIT and the ALLOWANCE of each step, together 1.7 % of a hundred
tokens, and in a batch so large that guesses cost more than they earn, all accounts run empty.

Tokens that requests have won beyond their own need, and balances of ended requests, go to common savings. Savings pay
for costs that no account can cover: a loan to a request whose credit is used up before its text begins to repeat, and
reading a text that the drafter must read before it can guess (a second engine computes all of it). The bound therefore
also holds over all requests together.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

CREDIT = 0.9  # tokens that a new request may lose
ALLOWANCE = 0.008  # tokens per step
MOST_SAVED = 8.0  # tokens; limits how much of its gain a request may lose again
MEMORY = 0.15  # weight of the newest draft in a request's rate
LONGEST_PAUSE = 256  # steps between two probes of a request whose guesses are wrong
IDLE_PAUSE = 64  # steps between two questions to a drafter that has no guesses for a request
LOAN = 4.0  # tokens that a request with an empty account gets from savings, once
MOST_SAVINGS = 256.0  # tokens: about the cost of reading a long text with a small engine
LITTLE = 16  # tokens of a text that a drafter may read without being charged
SLOPE = 0.04  # share of a plain step per guess, until steps with guesses were timed
OVERHEAD = 1e-4  # seconds that any guesses add to a step, until then
FIRST = 2.5  # times a plain step: limit for the first time of a step with guesses, which is unreliable
SLOWER = 0.6  # if plain steps fall below this share of their time when guesses were timed, those times are dropped


class StepTimes:
    """The time of a step by its number of tokens, measured so far; for steps with guesses, drafting is included."""

    def __init__(self, slope: float = SLOPE) -> None:
        self._slope = slope
        self._plain: dict[int, float] = {}
        self._guessed: dict[int, float] = {}
        self._sizes: list[int] = []  # numbers of tokens of steps with guesses, ascending
        self._then: dict[int, float] = {}  # by decodes, a plain step's seconds when guesses were first timed

    def record(self, decodes: int, guesses: int, seconds: float) -> None:
        """Record that a step with one token each of `decodes` requests, and `guesses` guesses, took `seconds`."""
        known, tokens = (self._guessed if guesses else self._plain), decodes + guesses
        old = known.get(tokens)
        if old is None:
            if guesses and decodes in self._plain and not self._sizes:  # a first run takes longer
                seconds = min(seconds, FIRST * self._plain[decodes])
            known[tokens] = seconds
            if guesses:
                insort(self._sizes, tokens)
        else:  # some steps take longer for other reasons, but none takes less than it needs
            down = 0.5 if guesses else 0.8  # so that charges are rather too high
            known[tokens] = old + (down if seconds < old else 0.1) * (min(seconds, 2 * old) - old)
        if guesses and decodes in self._plain:
            self._then.setdefault(decodes, self._plain[decodes])
        elif not guesses and known[tokens] < SLOWER * self._then.get(tokens, 0.0):
            self._forget_guesses()

    def _forget_guesses(self) -> None:
        """Drop the times with guesses: they were measured when the process was slow, as at its start, and might be so
        high that no request could pay to measure them again."""
        self._guessed.clear()
        self._sizes.clear()
        self._then.clear()

    def most(self, decodes: int) -> int:
        """How many guesses may be tried: none before a plain step was timed, then at most twice as many as were timed,
        so that a wrong estimate costs little."""
        if decodes not in self._plain:
            return 0
        return max(1, 2 * (self._sizes[-1] - decodes)) if self._sizes else 1

    def charge(self, decodes: int, guesses: int) -> float:
        """The cost of a step's guesses: the tokens that its `decodes` requests would have got in the added time.

        Requires that a plain step of `decodes` requests was timed.
        """
        plain = self._plain[decodes]
        return decodes * max(self._seconds(decodes, decodes + guesses) / plain - 1, 0.0)

    def price(self, decodes: int, seconds: float) -> float:
        """The tokens that `decodes` requests would have got in `seconds`; requires as `charge`."""
        return decodes * seconds / self._plain[decodes]

    def excess(self, decodes: int, seconds: float) -> float:
        """How much longer than a plain step a step of `decodes` requests without guesses took, in their tokens; 0
        before a plain step was timed."""
        return self.price(decodes, max(seconds - self._plain[decodes], 0.0)) if decodes in self._plain else 0.0

    def _seconds(self, decodes: int, tokens: int) -> float:
        """The seconds of a step: measured, interpolated between the nearest measured numbers of tokens (the lowest is a
        plain step), or extrapolated by the slope."""
        if tokens in self._guessed:
            return self._guessed[tokens]
        at = bisect_left(self._sizes, tokens)
        low = self._sizes[at - 1] if at and self._sizes[at - 1] > decodes else decodes
        before = self._plain[decodes] if low == decodes else self._guessed[low]
        if at == len(self._sizes):
            added = 0.0 if self._sizes else OVERHEAD
            return added + before * (1 + self._slope * tokens) / (1 + self._slope * low)
        high = self._sizes[at]
        return before + (self._guessed[high] - before) * (tokens - low) / (high - low)


@dataclass(slots=True)
class Account:
    """One request's account: its balance in tokens, how often its guesses are right, and how long it pauses."""

    rate: float  # the probability that a guess is right if all before it are
    balance: float = CREDIT
    idles: int = 0  # questions in a row that the drafter could not answer
    misses: int = 0  # drafts in a row without an accepted guess
    pause: int = 0  # steps until it may draft again
    declined: bool = False  # whether it pauses because it cannot pay
    lent: bool = False  # whether it has had a loan
    lost: bool = False  # whether the drafter no longer follows it, so that it drafts no more

    def tick(self, steps: int = 1) -> bool:
        """Advance by `steps` steps; whether the request may draft in the last of them."""
        self.balance = min(self.balance + steps * ALLOWANCE, MOST_SAVED)
        self.pause = max(self.pause - steps, 0)
        self.declined = self.declined and self.pause > 0
        return self.pause == 0

    def pay(self, charge: float) -> None:
        """Pay for asking the drafter, or for the attempt. At most CREDIT, because a longer time cannot come from
        asking."""
        charge = min(charge, CREDIT)
        self.balance -= charge
        if self.declined:
            self.pause = min(self.pause + round(charge / ALLOWANCE), LONGEST_PAUSE)

    def idle(self) -> None:
        """Pause after the drafter had no guess; it is asked again some steps later."""
        self.idles += 1
        self.pause = min(2 * 2**self.idles, IDLE_PAUSE)

    def settle(self, guesses: int, deepest: int, accepted: int, charge: float) -> None:
        """Account for a verified draft of `guesses` guesses, `deepest` tokens deep, of which `accepted` were accepted,
        at this charge."""
        self.balance += accepted - charge
        tried = min(accepted + 1, deepest)  # guesses after the first wrong one were not tried
        self.rate += MEMORY * min(tried, 4) / 2 * (accepted / tried - self.rate)
        self.idles = 0
        self.misses = 0 if accepted else self.misses + 1
        loses = self.misses and self.balance < CREDIT  # a request above its credit risks only its gains
        self.pause = min(2**self.misses, LONGEST_PAUSE) if loses else 0

    def decline(self, price: float) -> None:
        """Pause because a draft at this price is too expensive: asking again before the account can pay only takes
        time."""
        self.pause = round(min(max((price - self.balance) / ALLOWANCE, 1), LONGEST_PAUSE))
        self.declined = True


class Savings:
    """The common savings of all requests, in tokens, and the cost of reading texts, which they pay."""

    def __init__(self, balance: float = 0.0) -> None:
        self.balance = balance
        self._read_seconds = 0.0  # seconds per token; 0 before anything was read

    def collect(self, account: Account, need: float = MOST_SAVED) -> None:
        """Move the part of an account's balance above `need` to the savings."""
        beyond = account.balance - need
        if beyond > 0:
            account.balance = need
            self.balance = min(self.balance + beyond, MOST_SAVINGS)

    def lend(self, account: Account) -> bool:
        """Give the account a loan, if it had none before and the savings suffice; whether it got one."""
        if account.lent or self.balance < LOAN:
            return False
        self.balance -= LOAN
        account.balance += LOAN
        account.lent = True
        return True

    def cover(self, account: Account) -> bool:
        """Pay the debt of an account if the savings suffice; whether it has none now."""
        if account.balance < 0 <= self.balance + account.balance:
            self.balance += account.balance
            account.balance = 0.0
        return account.balance >= 0

    def estimate(self, tokens: int, times: StepTimes, decodes: int) -> float:
        """The estimated cost of reading `tokens` tokens beside `decodes` requests, in tokens of these."""
        if not self._read_seconds:
            return times.charge(decodes, tokens)  # as if they were guesses
        return times.price(decodes, tokens * self._read_seconds)

    def learn(self, tokens: int, seconds: float) -> None:
        """Record that `tokens` tokens were read in `seconds` seconds."""
        self._read_seconds = seconds / tokens

"""When guessing pays: what steps cost, and an account per request that is never overdrawn.

The unit of account is one token of plain decoding. A step with guesses takes longer than one without; that is charged
to the requests that guess, each by its share of the guesses, and so is the time of asking a drafter that has no answer.
An accepted guess is a token earned. Drafting stops where the account does not hold what the next draft would cost, so a
request that never accepts costs at most its CREDIT and the ALLOWANCE of each step, together 1.7 % of a hundred tokens,
and in a batch so large that guesses cost more than they earn every account runs dry.

What requests have won beyond their own need, and what those that have ended did not use, is saved. Savings pay for what
no account holds: a loan to a request whose credit is gone before its text turns out to repeat itself, and reading a
text where the drafter has to before it can guess (a second engine computes it all). Over all requests, then, the bound
holds as well.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

CREDIT = 0.9  # tokens that a new request may lose
ALLOWANCE = 0.008  # tokens per step
MOST_SAVED = 8.0  # tokens: what a request has won is no licence to lose it all again
MEMORY = 0.15  # weight of the newest draft in a request's rate
LONGEST_PAUSE = 256  # steps between two probes of a request whose guesses are wrong
IDLE_PAUSE = 64  # steps between two questions to a drafter that knows nothing of a request
LOAN = 4.0  # tokens that a request without means gets out of savings, once
MOST_SAVINGS = 256.0  # tokens: about the cost of reading a long text with a small engine
LITTLE = 16  # tokens of a text that a drafter reads in passing
SLOPE = 0.04  # of a plain step per guess, until steps with guesses have been timed
OVERHEAD = 1e-4  # seconds that any guesses add to a step, until then
FIRST = 2.5  # times a plain step: more than that is not believed of the first step with guesses
SLOWER = 0.6  # where plain steps take less than this share of what they took then, times with guesses are void


class StepTimes:
    """How long a step takes by its number of tokens, from the steps so far; with guesses, drafting included."""

    def __init__(self, slope: float = SLOPE) -> None:
        self._slope = slope
        self._plain: dict[int, float] = {}
        self._guessed: dict[int, float] = {}
        self._sizes: list[int] = []  # of steps with guesses, ascending
        self._then: dict[int, float] = {}  # by decodes, a plain step's time when guesses beside them were first timed

    def record(self, decodes: int, guesses: int, seconds: float) -> None:
        """A step of one token of each of `decodes` requests, and guesses, took `seconds`."""
        known, tokens = (self._guessed if guesses else self._plain), decodes + guesses
        old = known.get(tokens)
        if old is None:
            if guesses and decodes in self._plain and not self._sizes:  # what runs for the first time takes longer
                seconds = min(seconds, FIRST * self._plain[decodes])
            known[tokens] = seconds
            if guesses:
                insort(self._sizes, tokens)
        else:  # now and then a step takes long for other reasons, but none takes less than it needs
            down = 0.5 if guesses else 0.8  # so charges err upwards
            known[tokens] = old + (down if seconds < old else 0.1) * (min(seconds, 2 * old) - old)
        if guesses and decodes in self._plain:
            self._then.setdefault(decodes, self._plain[decodes])
        elif not guesses and known[tokens] < SLOWER * self._then.get(tokens, 0.0):
            self._forget_guesses()

    def _forget_guesses(self) -> None:
        """The process was slow when they were timed, as it is at first: nobody might afford to time them again."""
        self._guessed.clear()
        self._sizes.clear()
        self._then.clear()

    def most(self, decodes: int) -> int:
        """How many guesses may be tried: none before a step without them was timed, then at most twice as many as were
        timed, so that a wrong estimate costs little."""
        if decodes not in self._plain:
            return 0
        return max(1, 2 * (self._sizes[-1] - decodes)) if self._sizes else 1

    def charge(self, decodes: int, guesses: int) -> float:
        """What the guesses of a step cost: tokens that its `decodes` requests would have got in the time they add.

        Requires that a step of `decodes` requests was timed.
        """
        plain = self._plain[decodes]
        return decodes * max(self._seconds(decodes, decodes + guesses) / plain - 1, 0.0)

    def price(self, decodes: int, seconds: float) -> float:
        """The tokens that `decodes` requests would have got in so many seconds, under the same condition."""
        return decodes * seconds / self._plain[decodes]

    def excess(self, decodes: int, seconds: float) -> float:
        """What a step of `decodes` requests without guesses took beyond a plain one, in tokens of theirs; 0 before such
        a step was timed."""
        return self.price(decodes, max(seconds - self._plain[decodes], 0.0)) if decodes in self._plain else 0.0

    def _seconds(self, decodes: int, tokens: int) -> float:
        """Measured, or between the nearest measured ones, of which the first has no guesses, or by the slope beyond."""
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

    rate: float  # the probability that a guess is right, where all before it are
    balance: float = CREDIT
    idles: int = 0  # questions in a row that the drafter could not answer
    misses: int = 0  # drafts in a row of which nothing was accepted
    pause: int = 0  # steps until it may draft again
    declined: bool = False  # whether it pauses for want of tokens
    lent: bool = False  # whether it has had a loan

    def tick(self, steps: int = 1) -> bool:
        """Begin `steps` steps; whether the request may draft in the last of them."""
        self.balance = min(self.balance + steps * ALLOWANCE, MOST_SAVED)
        self.pause = max(self.pause - steps, 0)
        self.declined = self.declined and self.pause > 0
        return self.pause == 0

    def pay(self, charge: float) -> None:
        """For asking the drafter, or having been about to; but what takes long beyond reason was not the asking."""
        charge = min(charge, CREDIT)
        self.balance -= charge
        if self.declined:
            self.pause = min(self.pause + round(charge / ALLOWANCE), LONGEST_PAUSE)

    def idle(self) -> None:
        """The drafter knew nothing: it is asked again some steps later."""
        self.idles += 1
        self.pause = min(2 * 2**self.idles, IDLE_PAUSE)

    def settle(self, guesses: int, deepest: int, accepted: int, charge: float) -> None:
        """A draft of `guesses`, `deepest` tokens deep, was verified at this charge."""
        self.balance += accepted - charge
        tried = min(accepted + 1, deepest)  # whatever came after the first wrong guess was not tried
        self.rate += MEMORY * min(tried, 4) / 2 * (accepted / tried - self.rate)
        self.idles = 0
        self.misses = 0 if accepted else self.misses + 1
        loses = self.misses and self.balance < CREDIT  # who has won more risks nothing else
        self.pause = min(2**self.misses, LONGEST_PAUSE) if loses else 0

    def decline(self, price: float) -> None:
        """A draft could be had at this price and not be afforded: asking again before that only takes time."""
        self.pause = round(min(max((price - self.balance) / ALLOWANCE, 1), LONGEST_PAUSE))
        self.declined = True


class Savings:
    """What all requests have saved, in tokens, and what reading costs, which they pay for."""

    def __init__(self, balance: float = 0.0) -> None:
        self.balance = balance
        self._read_seconds = 0.0  # of a token; 0 before anything was read

    def collect(self, account: Account, need: float = MOST_SAVED) -> None:
        """Take what the account holds beyond the need."""
        beyond = account.balance - need
        if beyond > 0:
            account.balance = need
            self.balance = min(self.balance + beyond, MOST_SAVINGS)

    def lend(self, account: Account) -> bool:
        """Whether the account has got a loan."""
        if account.lent or self.balance < LOAN:
            return False
        self.balance -= LOAN
        account.balance += LOAN
        account.lent = True
        return True

    def estimate(self, tokens: int, times: StepTimes, decodes: int) -> float:
        """What it costs to read so many tokens beside `decodes` requests, in tokens of theirs."""
        if not self._read_seconds:
            return times.charge(decodes, tokens)  # as if they were guesses
        return times.price(decodes, tokens * self._read_seconds)

    def learn(self, tokens: int, seconds: float) -> None:
        """Note that `tokens` tokens were read in `seconds` seconds."""
        self._read_seconds = seconds / tokens

"""Accounts: how much every request may spend on guesses, and how many guesses pay for it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

from .drafter import Proposal
from .ledger import CREDIT, OVERHEAD, Account, Savings, StepTimes

COMMON_MEMORY = 0.05  # weight of a draft in the rate that is expected of new requests
PATIENCE = 3  # how many guesses beyond the best number are considered


class Accounts:
    """The accounts of all requests, by request id, with measured prices.

    first_rate: see `Drafter`. observes: whether the drafter observes every step, which is charged to the observed
    requests. most: the most guesses of one request in one step. stake: the savings, in tokens, at the start.
    """

    def __init__(self, first_rate: float, observes: bool, most: int, slope: float, stake: float = 0.0) -> None:
        self.times = StepTimes(slope)
        self.savings = Savings(stake)
        self.most = most
        self._observes = observes
        self._accounts: dict[int, Account] = {}
        self._rate = first_rate  # expected rate of a new request, from earlier ones
        self._look = 0.0  # the last price per request for observing a step, in tokens

    def of(self, request_id: int) -> Account:
        """The account of a request, which is made if it has none."""
        account = self._accounts.get(request_id)
        if account is None:
            account = self._accounts[request_id] = Account(rate=self._rate)
        return account

    def tick(self, requests: Iterable[int], steps: int) -> None:
        """Record that `steps` steps of these requests have run without accounting."""
        for request_id in requests:
            if request_id in self._accounts:
                self._accounts[request_id].tick(steps)

    def can_draft_next(self, request_id: int, batch: int) -> bool:
        """Whether the request may draft in the next step, which has `batch` requests."""
        account = self.of(request_id)
        if account.pause > 1 or not self.times.most(batch):
            return False
        return account.balance >= self.times.charge(batch, 1) + self._look_price(batch)

    def affords_one(self, account: Account, decodes: int) -> bool:
        """Whether the account, if needed with a loan, can pay for one guess; if not, it pauses until it can."""
        charge = self.times.charge(decodes, 1)  # observing this step is paid already
        if account.balance < charge and not self.savings.lend(account):
            account.decline(charge + self._look_price(decodes))
            return False
        return True

    def affordable(self, account: Account, decodes: int) -> int:
        """How many guesses the account can pay for, even if none is accepted."""
        most = min(self.most, self.times.most(decodes))
        return bisect_right(range(1, most + 1), account.balance, key=lambda count: self.times.charge(decodes, count))

    def worth(self, chances: Iterable[float], account: Account, decodes: int) -> int:
        """The number of guesses, best first, with the largest gain over their cost; at least one, as a probe, if
        affordable."""
        count, best, gain = 0, 0.0, 0.0
        most = min(self.most, self.times.most(decodes))
        for number, chance in enumerate(chances, start=1):
            if number > most or number > count + PATIENCE:
                break
            gain += chance
            charge = self.times.charge(decodes, number)
            if charge > account.balance:
                break
            if gain - charge > best or number == 1:
                count, best = number, gain - charge
        return count

    def worth_of(self, request_id: int, proposal: Proposal, decodes: int) -> int:
        """How many guesses of a proposal the request takes; if 0, it pauses until it can pay for one."""
        account = self.of(request_id)
        count = self.worth(proposal.chances, account, decodes)
        if not count:
            account.decline(self.times.charge(decodes, 1))
        return count

    def pay_look(self, requests: Sequence[int], batch: int, seconds: float) -> None:
        """Charge these requests, of `batch` running ones, for `seconds` in which the drafter observed their step."""
        self._look = self.times.price(batch, seconds) / len(requests)
        for request_id in requests:
            self.of(request_id).balance -= self._look

    def pay_following(self, requests: Sequence[int], decodes: int, seconds: float) -> list[int]:
        """Charge these requests, of `decodes` that decoded, for `seconds` in which the drafter followed their step,
        each at most CREDIT, because more time has other causes. Returns those that cannot pay: the drafter loses them.
        """
        if not self.times.most(decodes):
            return []
        price = min(self.times.price(decodes, seconds) / len(requests), CREDIT)
        lost: list[int] = []
        for request_id in requests:
            account = self.of(request_id)
            account.balance -= price
            if not self.savings.cover(account):
                account.lost = True
                lost.append(request_id)
        return lost

    def _look_price(self, decodes: int) -> float:
        """The price in tokens, per request, for observing a step."""
        if not self._observes:
            return 0.0
        return self._look or self.times.price(decodes, OVERHEAD)

    def settle(self, request_id: int, depths: Sequence[int], right: int, price: float, hopeful: bool = True) -> None:
        """Account for verified guesses at these depths, of which `right` were accepted; each cost `price` tokens.
        hopeful: whether any had a chance above 0."""
        account = self.of(request_id)
        if not hopeful and not right:
            account.balance -= price * len(depths)
            return
        account.settle(len(depths), max(depths), right, price * len(depths))
        self._rate += COMMON_MEMORY * (account.rate - self._rate)
        self.savings.collect(account)

    def close(self, request_id: int) -> None:
        """Close the account of a request that has ended."""
        account = self._accounts.pop(request_id, None)
        if account is not None:
            self.savings.collect(account, CREDIT)

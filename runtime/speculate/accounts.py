"""Accounts: what every request may spend on guesses, and what a draft is worth to it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

from .drafter import Proposal
from .ledger import CREDIT, OVERHEAD, Account, Savings, StepTimes

COMMON_MEMORY = 0.05  # weight of a draft in what is expected of the next request
PATIENCE = 3  # guesses beyond the best number that are looked at


class Accounts:
    """The accounts of all requests, by request id, in prices that were measured.

    first_rate: see `Drafter`. observes: whether the drafter looks at every step, which costs the requests that it
    looks at. most: guesses of one request in one step. stake: tokens that are saved before anybody has won any.
    """

    def __init__(self, first_rate: float, observes: bool, most: int, slope: float, stake: float = 0.0) -> None:
        self.times = StepTimes(slope)
        self.savings = Savings(stake)
        self.most = most
        self._observes = observes
        self._accounts: dict[int, Account] = {}
        self._rate = first_rate  # of a request of which nothing is known, by those before it
        self._look = 0.0  # what it cost a request lately that the drafter observed its step

    def of(self, request_id: int) -> Account:
        """The account of a request; a new one where it has none."""
        account = self._accounts.get(request_id)
        if account is None:
            account = self._accounts[request_id] = Account(rate=self._rate)
        return account

    def tick(self, requests: Iterable[int], steps: int) -> None:
        """Note that `steps` steps have run of which these requests were not told."""
        for request_id in requests:
            if request_id in self._accounts:
                self._accounts[request_id].tick(steps)

    def can_draft_next(self, request_id: int, batch: int) -> bool:
        """Whether the request may draft in the next step, of `batch` requests."""
        account = self.of(request_id)
        if account.pause > 1 or not self.times.most(batch):
            return False
        return account.balance >= self.times.charge(batch, 1) + self._look_price(batch)

    def affords_one(self, account: Account, decodes: int) -> bool:
        """Whether the account, or a loan, pays for one guess; if not, it pauses until it does."""
        charge = self.times.charge(decodes, 1)  # what the drafter observed is paid for already, this time
        if account.balance < charge and not self.savings.lend(account):
            account.decline(charge + self._look_price(decodes))
            return False
        return True

    def affordable(self, account: Account, decodes: int) -> int:
        """How many guesses the account pays for, whatever they bring."""
        most = min(self.most, self.times.most(decodes))
        return bisect_right(range(1, most + 1), account.balance, key=lambda count: self.times.charge(decodes, count))

    def worth(self, chances: Iterable[float], account: Account, decodes: int) -> int:
        """How many of the guesses, best first, gain most above their cost; at least one, as a probe, if affordable."""
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
        """How many guesses of a proposal the request takes; with none, it pauses until it affords one."""
        account = self.of(request_id)
        count = self.worth(proposal.chances, account, decodes)
        if not count:
            account.decline(self.times.charge(decodes, 1))
        return count

    def pay_look(self, requests: Sequence[int], batch: int, seconds: float) -> None:
        """The drafter has looked at the step of these requests, of `batch` that run, which took so long."""
        self._look = self.times.price(batch, seconds) / len(requests)
        for request_id in requests:
            self.of(request_id).balance -= self._look

    def _look_price(self, decodes: int) -> float:
        """What it costs a request that the drafter observes a step."""
        if not self._observes:
            return 0.0
        return self._look or self.times.price(decodes, OVERHEAD)

    def settle(self, request_id: int, depths: Sequence[int], right: int, price: float, hopeful: bool = True) -> None:
        """Guesses at these depths were verified, `right` of them accepted; each cost `price`. hopeful: whether any had
        a chance."""
        account = self.of(request_id)
        if not hopeful and not right:
            account.balance -= price * len(depths)
            return
        account.settle(len(depths), max(depths), right, price * len(depths))
        self._rate += COMMON_MEMORY * (account.rate - self._rate)
        self.savings.collect(account)

    def close(self, request_id: int) -> None:
        """The request has ended."""
        account = self._accounts.pop(request_id, None)
        if account is not None:
            self.savings.collect(account, CREDIT)

"""Speculator: who drafts in the next step, and how much; between the engine loop, a drafter and the ledger."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

from ..batch.scheduled import Draft, ScheduledBatch, ScheduledSequence, StepOutcome
from ..format.speculation import MAX_GUESSES
from ..requests.generation import Generation
from .drafter import Drafter, Proposal, Wish
from .ledger import CREDIT, LITTLE, OVERHEAD, SLOPE, Account, Savings, StepTimes
from .typical import TypicalAcceptance

COMMON_MEMORY = 0.05  # weight of a draft in what is expected of the next request
PATIENCE = 3  # guesses beyond the best number that are looked at


@dataclass(slots=True)
class SpeculationCounts:
    """What speculation did since it was loaded: decode tokens and the steps of requests that gave them, and of these
    steps those with a draft, the guesses in them and those accepted."""

    tokens: int = 0
    steps: int = 0
    drafts: int = 0
    guesses: int = 0
    accepted: int = 0

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / self.steps if self.steps else 0.0


class Speculator:
    """Asks the drafter for those requests that can afford it, and keeps the accounts.

    `adaptive` False drafts at every step as much as the drafter gives: for measuring it. `typical`: how guesses are
    accepted; None keeps the model's distribution.
    """

    typical: TypicalAcceptance | None = None

    def __init__(
        self, drafter: Drafter, *, adaptive: bool = True, max_guesses: int = MAX_GUESSES, slope: float = SLOPE
    ) -> None:
        self.drafter = drafter
        self.times = StepTimes(slope)
        self.savings = Savings()
        self.counts = SpeculationCounts()
        self.adaptive, self._most = adaptive, max_guesses
        self._accounts: dict[int, Account] = {}
        self._rate = drafter.first_rate  # of a request of which nothing is known, by those before it
        self._look = 0.0  # what it cost a request lately that the drafter observed its step
        self._closing = 0.0  # seconds that `settle` took the last time that it had something to do
        # of the step under way:
        self._asked = False  # whether `drafts` was called for it
        self._drafting = False  # whether it has guesses
        self._looked_at: list[Account] = []  # of the requests that might have drafted
        self._reading = 0.0  # seconds in which the drafter read texts, which are paid for
        self.rest = 0  # steps to come in which nothing is to be done: then neither `drafts` nor `settle` need be called
        self._known: Sequence[int] = ()  # the requests of the last step of which it was told

    def drafts(self, decoding: Sequence[int], generations: Mapping[int, Generation]) -> dict[int, Draft]:
        """Drafts for the next step, of the requests `decoding`."""
        self._drafting, self._asked, self._reading = False, True, 0.0
        self._looked_at.clear()
        count = len(decoding)
        wishes = [wish for i in decoding if (wish := self._wish(generations[i], count)) is not None]
        if not wishes:
            return {}
        proposals = self.drafter.propose(wishes)
        for wish in wishes:
            if wish.generation.request_id not in proposals:
                self._account(wish.generation.request_id).idle()
        found = {i: self._afforded(i, proposal, count) for i, proposal in proposals.items()}
        drafts = {request_id: draft for request_id, draft in found.items() if len(draft)}
        self._drafting = bool(drafts)
        return drafts

    def skip(self, steps: int) -> None:
        """So many steps have run of which nothing was told."""
        self.counts.tokens += steps * len(self._known)
        self.counts.steps += steps * len(self._known)
        for request_id in self._known:
            if request_id in self._accounts:
                self._accounts[request_id].tick(steps)

    def _wish(self, generation: Generation, decodes: int) -> Wish | None:
        account = self._account(generation.request_id)
        room = generation.params.max_tokens - len(generation.token_ids) - 1
        if not self.adaptive:
            account.tick()
            return Wish(generation, min(self._most, room), account.rate) if room > 0 else None
        if not account.tick() or room <= 0 or not self.times.most(decodes):  # first a step without guesses is timed
            return None
        self._looked_at.append(account)
        if not self._has_read(generation, account, decodes):
            return None
        if not self.drafter.knows(generation):
            account.idle()
            return None
        charge = self.times.charge(decodes, 1)  # what the drafter observed is paid for already, this time
        if account.balance < charge and not self.savings.lend(account):
            account.decline(charge + self._look_price(decodes))
            return None
        chances = (account.rate ** (depth + 1) for depth in range(self._most))
        count = min(self._worth(chances, account, decodes), room)
        return Wish(generation, count, account.rate) if count else None

    def _has_read(self, generation: Generation, account: Account, decodes: int) -> bool:
        """Whether the drafter knows the request's text, which it reads here if that can be paid."""
        tokens = self.drafter.backlog(generation)
        if tokens <= LITTLE:
            return True
        price = self.savings.estimate(tokens, self.times, decodes)
        payer = account if price <= account.balance else self.savings
        if price > payer.balance:
            account.decline(price)
            return False
        start = perf_counter()
        self.drafter.read(generation)
        seconds = perf_counter() - start
        self._reading += seconds
        payer.balance -= self.times.price(decodes, seconds)
        left = self.drafter.backlog(generation)
        if left < tokens:
            self.savings.learn(tokens - left, seconds)
        if left > LITTLE:  # it has no room
            account.idle()
        return left <= LITTLE

    def idle(self, requests: Sequence[int]) -> bool:
        """Whether none of these requests may draft in the next step."""
        return self.adaptive and not any(self._may_draft_next(i, len(requests)) for i in requests)

    def observe(self, rows: Mapping[int, int]) -> None:
        """The logit rows behind the newest tokens of the requests that go on; see `Drafter.observe`."""
        if not self.drafter.observes:
            return
        batch = len(rows)
        wanted = {i: row for i, row in rows.items() if not self.adaptive or self._may_draft_next(i, batch)}
        start = perf_counter()
        self.drafter.observe(wanted, batch)
        if wanted and self.times.most(batch):  # draft heads run now, whether or not their guesses are afforded then
            self._look = self.times.price(batch, perf_counter() - start) / len(wanted)
            for request_id in wanted:
                self._account(request_id).balance -= self._look

    def plain(self, batch: ScheduledBatch, outcomes: Sequence[StepOutcome], seconds: float) -> None:
        """A step that nobody had guesses for, or was asked for any, took so long."""
        if batch.num_tokens == len(batch.sequences) == len(outcomes):  # decodes only
            self.times.record(len(outcomes), 0, seconds)

    def settle(self, batch: ScheduledBatch, outcomes: Sequence[StepOutcome], seconds: float) -> None:
        """A step has run: what it gave to each request, and how long it took, drafting included."""
        start = perf_counter()
        self.rest = 0
        asked, self._asked = self._asked, False
        if not asked:
            self.plain(batch, outcomes, seconds)
            self.skip(1)
            return
        self._known = [sequence.request_id for sequence in batch.sequences]
        seconds += self._closing - self._reading
        if self._drafting:
            self._settle_drafts(batch, outcomes, seconds)
        elif batch.num_tokens == len(batch.sequences) == len(outcomes):
            self._settle_plain(len(outcomes), seconds)
        self._closing = perf_counter() - start

    def _settle_plain(self, count: int, seconds: float) -> None:
        """A step of `count` decodes to which the drafter had nothing to say."""
        self.counts.tokens += count
        self.counts.steps += count
        if not self._looked_at:
            self.times.record(count, 0, seconds)
        else:
            price = self.times.excess(count, seconds) / len(self._looked_at)
            for account in self._looked_at:
                account.pay(price)
        if self.adaptive:  # where all pause, nothing is to be done until the first of them wakes
            pause = min(self._account(request_id).pause for request_id in self._known)
            self.rest = max(pause - 1 - self.drafter.observes, 0)

    def _settle_drafts(self, batch: ScheduledBatch, outcomes: Sequence[StepOutcome], seconds: float) -> None:
        decodes = [s for s in batch.sequences if len(s.token_ids) == 1 + len(s.draft or ()) and s.num_logits]
        guesses = sum(len(s.draft) for s in decodes if s.draft)
        if len(decodes) == len(batch.sequences):
            self.times.record(len(decodes), guesses, seconds)
        charge = self.times.charge(len(decodes), guesses) if guesses and self.times.most(len(decodes)) else 0.0
        accepted = {outcome.request_id: len(outcome.accepted) for outcome in outcomes}
        for sequence in decodes:
            if sequence.request_id in accepted:  # else it has ended since
                self._settle(sequence, accepted[sequence.request_id], charge / guesses if guesses else 0.0)

    def _settle(self, sequence: ScheduledSequence, right: int, price: float) -> None:
        """`right` guesses of a sequence were accepted; each of its guesses cost `price`."""
        self.counts.tokens += 1 + right
        self.counts.steps += 1
        if sequence.draft:
            guesses = len(sequence.draft)
            account = self._account(sequence.request_id)
            account.settle(guesses, max(sequence.draft.depths()), right, price * guesses)
            self._rate += COMMON_MEMORY * (account.rate - self._rate)
            self.savings.collect(account)
            self.counts.drafts += 1
            self.counts.guesses += guesses
            self.counts.accepted += right

    def forget(self, request_id: int) -> None:
        """The request has ended."""
        account = self._accounts.pop(request_id, None)
        if account is not None:
            self.savings.collect(account, CREDIT)
        self.drafter.forget(request_id)

    def _account(self, request_id: int) -> Account:
        account = self._accounts.get(request_id)
        if account is None:
            account = self._accounts[request_id] = Account(rate=self._rate)
        return account

    def _may_draft_next(self, request_id: int, batch: int) -> bool:
        account = self._account(request_id)
        if account.pause > 1 or not self.times.most(batch):
            return False
        return account.balance >= self.times.charge(batch, 1) + self._look_price(batch)

    def _look_price(self, decodes: int) -> float:
        """What it costs a request that the drafter observes a step."""
        if not self.drafter.observes:
            return 0.0
        return self._look or self.times.price(decodes, OVERHEAD)

    def _afforded(self, request_id: int, proposal: Proposal, decodes: int) -> Draft:
        """The guesses that are worth their cost, within what the account holds."""
        account = self._account(request_id)
        count = self._worth(proposal.chances, account, decodes)
        if not count:
            account.decline(self.times.charge(decodes, 1))
        return proposal.draft.limited(count, len(proposal.draft))

    def _worth(self, chances: Iterable[float], account: Account, decodes: int) -> int:
        """How many of the guesses, best first, gain most above their cost; at least one, as a probe, if affordable."""
        if not self.adaptive:
            return self._most
        count, best, gain = 0, 0.0, 0.0
        most = min(self._most, self.times.most(decodes))
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

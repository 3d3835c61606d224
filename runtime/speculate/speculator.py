"""Speculator: before a step, asks a drafter for the requests that can pay for it; after the step, settles their
accounts.

Its phase is its role in the current step:

    IDLE --drafts--> ASKED (no guesses) | DRAFTING --learn--> IDLE
                     ASKED --learn, where every request pauses--> RESTING --learn, after `rest` steps--> IDLE
    IDLE --learn--> IDLE          a step that nobody was asked for, because it ran ahead or its requests are on trial
    RESTING --wake, forget--> IDLE

While it rests it does almost nothing. Most steps of requests whose guesses fail are steps of rest. When the rest ends,
the pauses in the requests' accounts are reduced by its number of steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from time import perf_counter

from ..batch.scheduled import Draft, ScheduledBatch, ScheduledSequence, StepOutcome
from ..format.speculation import MAX_GUESSES
from ..requests.generation import Generation
from .accounts import Accounts
from .drafter import Drafter, Wish
from .ledger import LITTLE, LONGEST_PAUSE, SLOPE, Account
from .typical import TypicalAcceptance


class SpeculationPhase(Enum):
    """The role of the speculator in the current step; see the module's docstring."""

    IDLE = "idle"
    ASKED = "asked"
    DRAFTING = "drafting"
    RESTING = "resting"


@dataclass(slots=True)
class SpeculationCounts:
    """Counts since the engine was loaded: decode tokens, and the steps of requests that gave them; of these steps those
    with a draft; the guesses in drafts, and the accepted guesses."""

    tokens: int = 0
    steps: int = 0
    drafts: int = 0
    guesses: int = 0
    accepted: int = 0

    @property
    def tokens_per_step(self) -> float:
        """The mean number of decode tokens per step of a request; 0 before the first step."""
        return self.tokens / self.steps if self.steps else 0.0


class Speculator:
    """Call `drafts`, run the step, call `learn`; only `learn` after a step for which it was not asked.

    adaptive: False: draft at every step as much as the drafter can, to measure it. typical: how guesses are accepted;
    None: losslessly.
    """

    def __init__(
        self,
        drafter: Drafter,
        *,
        adaptive: bool = True,
        max_guesses: int = MAX_GUESSES,
        slope: float = SLOPE,
        typical: TypicalAcceptance | None = None,
    ) -> None:
        self.drafter, self.typical = drafter, typical
        self.accounts = Accounts(drafter.first_rate, drafter.observes, max_guesses, slope, drafter.stake)
        self.counts = SpeculationCounts()
        self.adaptive = adaptive
        self.phase = SpeculationPhase.IDLE
        self._rest = self._rested = 0  # steps left of a rest; steps of the rest that were not accounted for
        self._known: Sequence[int] = ()  # the requests of the last step that was accounted for
        self._closing = 0.0  # seconds of the last `settle` that had work
        # facts about the current step:
        self._looked_at: list[Account] = []  # accounts of the requests that might have drafted
        self._reading = 0.0  # seconds in which the drafter read texts, which are already paid
        self._hopeless: set[int] = set()  # requests whose guesses have no chance above 0

    # -- before a step -----------------------------------------------------------------------------------------------

    def drafts(self, decoding: Sequence[Generation]) -> dict[int, Draft]:
        """Drafts for the next step, in which one token of each of these requests runs; none while it rests."""
        if self.phase is SpeculationPhase.RESTING:
            return {}
        self.phase, self._reading = SpeculationPhase.ASKED, 0.0
        self._looked_at.clear()
        self._hopeless.clear()
        count = len(decoding)
        wishes = [wish for generation in decoding if (wish := self._wish(generation, count)) is not None]
        if not wishes:
            return {}
        proposals = self.drafter.propose(wishes)
        for wish in wishes:
            if wish.generation.request_id not in proposals:
                self.accounts.of(wish.generation.request_id).idle()
        drafts: dict[int, Draft] = {}
        for request_id, proposal in proposals.items():
            priced = self.adaptive and not self.drafter.explores
            most = self.accounts.worth_of(request_id, proposal, count) if priced else self.accounts.most
            draft = proposal.draft.limited(most, len(proposal.draft))
            if len(draft):
                drafts[request_id] = draft
            if not any(proposal.chances):
                self._hopeless.add(request_id)
        if drafts:
            self.phase = SpeculationPhase.DRAFTING
        return drafts

    def _wish(self, generation: Generation, decodes: int) -> Wish | None:
        accounts, account = self.accounts, self.accounts.of(generation.request_id)
        if account.lost or not generation.params.speculative:
            account.pause = LONGEST_PAUSE  # renewed at every step
            return None
        room = generation.params.max_tokens - len(generation.token_ids) - 1
        if not self.adaptive:
            account.tick()
            most = accounts.most if self.drafter.explores else min(accounts.most, room)
            return Wish(generation, most, account.rate) if room > 0 else None
        if not account.tick() or room <= 0 or not accounts.times.most(decodes):  # a plain step must be timed first
            return None
        self._looked_at.append(account)
        if not self._has_read(generation, account, decodes):
            return None
        if not self.drafter.knows(generation):
            account.idle()
            return None
        if not accounts.affords_one(account, decodes):
            return None
        if self.drafter.explores:
            return Wish(generation, accounts.affordable(account, decodes), account.rate)
        chances = (account.rate ** (depth + 1) for depth in range(accounts.most))
        count = min(accounts.worth(chances, account, decodes), room)
        return Wish(generation, count, account.rate) if count else None

    def _has_read(self, generation: Generation, account: Account, decodes: int) -> bool:
        """Whether the drafter has read the request's text; it reads it here if that can be paid."""
        tokens = self.drafter.backlog(generation)
        if tokens <= LITTLE:
            return True
        times, savings = self.accounts.times, self.accounts.savings
        price = savings.estimate(tokens, times, decodes)
        payer = account if price <= account.balance else savings
        if price > payer.balance:
            account.decline(price)
            return False
        start = perf_counter()
        self.drafter.read(generation)
        seconds = perf_counter() - start
        self._reading += seconds
        payer.balance -= times.price(decodes, seconds)
        left = self.drafter.backlog(generation)
        if left < tokens:
            savings.learn(tokens - left, seconds)
        if left > LITTLE:  # the drafter has no memory for it
            account.idle()
        return left <= LITTLE

    def idle(self, requests: Sequence[int]) -> bool:
        """Whether none of these requests may have guesses in the next step."""
        if self._rest > 1:
            return True
        return self.adaptive and not any(self.accounts.can_draft_next(i, len(requests)) for i in requests)

    # -- after a step ------------------------------------------------------------------------------------------------

    def learn(
        self,
        batch: ScheduledBatch,
        outcomes: Sequence[StepOutcome],
        rows: Mapping[int, int] | None,
        seconds: float,
    ) -> None:
        """Account for a step, which took `seconds`, drafting included. rows: the logit row of the newest token of each
        request that continues; None if the device has overwritten them."""
        if self.phase is SpeculationPhase.RESTING:
            self._rest -= 1
            self._rested += 1
            if not self._rest:
                self._time_plain(batch, outcomes, seconds)
                self.wake()
            return
        self.settle(batch, outcomes, seconds)
        if rows is not None:
            self.observe(rows)

    def wake(self) -> None:
        """End the rest: it is over, or the requests have changed."""
        if self.phase is SpeculationPhase.RESTING:
            if self._rested:
                self._skip(self._rested)
            self._rest = self._rested = 0
            self.phase = SpeculationPhase.IDLE

    def observe(self, rows: Mapping[int, int]) -> None:
        """Let the drafter observe the logit rows of the newest tokens of requests that continue; see
        `Drafter.observe`."""
        if not self.drafter.observes:
            return
        batch = len(rows)
        wanted = {i: row for i, row in rows.items() if not self.adaptive or self.accounts.can_draft_next(i, batch)}
        start = perf_counter()
        self.drafter.observe(wanted, batch)
        if wanted and self.accounts.times.most(batch):  # the heads have run, even if their guesses cannot be paid later
            self.accounts.pay_look(list(wanted), batch, perf_counter() - start)

    def follow(self, batch: ScheduledBatch, generations: Mapping[int, Generation]) -> None:
        """Let the drafter follow a step of these requests; those that cannot pay for it are followed no more."""
        followed = {i: one for i, one in generations.items() if not self.accounts.of(i).lost}
        if not followed:
            return
        start = perf_counter()
        self.drafter.follow(batch, followed)
        if self.adaptive and all(sequence.decodes for sequence in batch.sequences):
            decodes, seconds = len(batch.sequences), perf_counter() - start
            for request_id in self.accounts.pay_following(list(followed), decodes, seconds):
                self.drafter.forget(request_id)

    def settle(self, batch: ScheduledBatch, outcomes: Sequence[StepOutcome], seconds: float) -> None:
        """Account for the tokens of each request in a step, and for its cost."""
        start = perf_counter()
        phase, self.phase = self.phase, SpeculationPhase.IDLE
        if phase is SpeculationPhase.IDLE:
            self._time_plain(batch, outcomes, seconds)
            self._skip(1)
            return
        self._known = [sequence.request_id for sequence in batch.sequences]
        seconds += self._closing - self._reading
        if phase is SpeculationPhase.DRAFTING:
            self._settle_drafts(batch, outcomes, seconds)
        elif _decodes_only(batch, outcomes):
            self._settle_plain(len(outcomes), seconds)
        self._closing = perf_counter() - start

    def _time_plain(self, batch: ScheduledBatch, outcomes: Sequence[StepOutcome], seconds: float) -> None:
        """Record the time of a step without guesses, for which the speculator was not asked."""
        if _decodes_only(batch, outcomes):
            self.accounts.times.record(len(outcomes), 0, seconds)

    def _skip(self, steps: int) -> None:
        """Record that `steps` steps have run without accounting."""
        self.counts.tokens += steps * len(self._known)
        self.counts.steps += steps * len(self._known)
        self.accounts.tick(self._known, steps)

    def _settle_plain(self, count: int, seconds: float) -> None:
        """Account for a step of `count` decodes for which the drafter had no guesses."""
        self.counts.tokens += count
        self.counts.steps += count
        if not self._looked_at:
            self.accounts.times.record(count, 0, seconds)
        else:
            price = self.accounts.times.excess(count, seconds) / len(self._looked_at)
            for account in self._looked_at:
                account.pay(price)
        if self.adaptive:  # if all requests pause, rest until the first pause ends
            pause = min(self.accounts.of(request_id).pause for request_id in self._known)
            self._rest = max(pause - 1 - self.drafter.observes, 0)
            if self._rest:
                self.phase = SpeculationPhase.RESTING

    def _settle_drafts(self, batch: ScheduledBatch, outcomes: Sequence[StepOutcome], seconds: float) -> None:
        times = self.accounts.times
        decodes = [sequence for sequence in batch.sequences if sequence.decodes]
        guesses = sum(len(s.draft) for s in decodes if s.draft)
        if len(decodes) == len(batch.sequences):
            times.record(len(decodes), guesses, seconds)
        charge = times.charge(len(decodes), guesses) if guesses and times.most(len(decodes)) else 0.0
        accepted = {outcome.request_id: len(outcome.accepted) for outcome in outcomes}
        for sequence in decodes:
            if sequence.request_id in accepted:  # otherwise the request has ended
                self._settle_sequence(sequence, accepted[sequence.request_id], charge / guesses if guesses else 0.0)

    def _settle_sequence(self, sequence: ScheduledSequence, right: int, price: float) -> None:
        """Account for a sequence: `right` of its guesses were accepted, and each guess cost `price` tokens."""
        self.counts.tokens += 1 + right
        self.counts.steps += 1
        if sequence.draft:
            hopeful = sequence.request_id not in self._hopeless
            self.accounts.settle(sequence.request_id, sequence.draft.depths(), right, price, hopeful)
            self.counts.drafts += 1
            self.counts.guesses += len(sequence.draft)
            self.counts.accepted += right

    def forget(self, request_id: int) -> None:
        """Drop a request that has ended."""
        self.wake()
        self.accounts.close(request_id)
        self.drafter.forget(request_id)


def _decodes_only(batch: ScheduledBatch, outcomes: Sequence[StepOutcome]) -> bool:
    """Whether every sequence of a step had one token and got an outcome."""
    return batch.num_tokens == len(batch.sequences) == len(outcomes)

"""Speculator: who drafts in the next step, and how much; between the engine loop, a drafter and the ledger."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..generation import Generation
from ..scheduler.batch import Draft, ScheduledBatch
from .drafter import Drafter, Proposal, Wish, chain_chances
from .ledger import SLOPE, Account, StepTimes

MAX_GUESSES = 63  # of one request in one step: with its last token, a tree of at most 64


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

    `adaptive` False drafts at every step as much as the drafter gives: for measuring it.
    """

    def __init__(
        self, drafter: Drafter, *, adaptive: bool = True, max_guesses: int = MAX_GUESSES, slope: float = SLOPE
    ) -> None:
        self.drafter = drafter
        self.times = StepTimes(slope)
        self.counts = SpeculationCounts()
        self._adaptive, self._most = adaptive, max_guesses
        self._accounts: dict[int, Account] = {}

    def drafts(self, decoding: Sequence[int], generations: Mapping[int, Generation]) -> dict[int, Draft]:
        """Drafts for the next step, of the requests `decoding`."""
        wishes: list[Wish] = []
        for request_id in decoding:
            generation, account = generations[request_id], self._account(request_id)
            ready = account.tick()
            room = generation.params.max_tokens - len(generation.token_ids) - 1
            if room > 0 and (ready or not self._adaptive):
                count = min(self._worth(chain_chances(self._most, account.rate), account, len(decoding)), room)
                wishes.append(Wish(generation, count, account.rate))
        if not wishes:
            return {}
        proposals = self.drafter.propose(wishes)
        found = {i: self._afforded(i, proposal, len(decoding)) for i, proposal in proposals.items()}
        return {request_id: draft for request_id, draft in found.items() if len(draft)}

    def idle(self, requests: Sequence[int]) -> bool:
        """Whether none of these requests may draft in the next step."""
        return self._adaptive and not any(self._may_draft_next(i, len(requests)) for i in requests)

    def observe(self, rows: Mapping[int, int]) -> None:
        """The logit rows behind the newest tokens of the requests that go on; see `Drafter.observe`."""
        batch = len(rows)
        wanted = {i: row for i, row in rows.items() if not self._adaptive or self._may_draft_next(i, batch)}
        self.drafter.observe(wanted, batch)

    def settle(self, batch: ScheduledBatch, accepted: Mapping[int, int], seconds: float) -> None:
        """A step has run: how many guesses each of its requests got accepted, and how long it all took."""
        decodes = [s for s in batch.sequences if len(s.token_ids) == 1 + len(s.draft or ()) and s.num_logits]
        guesses = sum(len(s.draft) for s in decodes if s.draft)
        if len(decodes) == len(batch.sequences):
            self.times.record(len(decodes), guesses, seconds)
        charge = self.times.charge(len(decodes), guesses)
        for sequence in decodes:
            if sequence.request_id not in accepted:
                continue  # it scores, or has ended since
            right = accepted[sequence.request_id]
            self.counts.tokens += 1 + right
            self.counts.steps += 1
            if sequence.draft:
                share = charge * len(sequence.draft) / guesses
                self._account(sequence.request_id).settle(
                    len(sequence.draft), max(sequence.draft.depths()), right, share
                )
                self.counts.drafts += 1
                self.counts.guesses += len(sequence.draft)
                self.counts.accepted += right

    def forget(self, request_id: int) -> None:
        """The request has ended."""
        self._accounts.pop(request_id, None)
        self.drafter.forget(request_id)

    def _account(self, request_id: int) -> Account:
        if request_id not in self._accounts:
            self._accounts[request_id] = Account(rate=self.drafter.first_rate)
        return self._accounts[request_id]

    def _may_draft_next(self, request_id: int, batch: int) -> bool:
        account = self._account(request_id)
        return account.pause <= 1 and account.balance >= self.times.charge(batch, 1) / batch

    def _afforded(self, request_id: int, proposal: Proposal, decodes: int) -> Draft:
        """The guesses that are worth their cost, within what the account holds."""
        count = self._worth(proposal.chances, self._account(request_id), decodes)
        return proposal.draft.limited(count, len(proposal.draft))

    def _worth(self, chances: Sequence[float], account: Account, decodes: int) -> int:
        """How many of the guesses, best first, gain most above their cost; at least one, as a probe, if affordable."""
        if not self._adaptive:
            return self._most
        count, best, gain = 0, 0.0, 0.0
        for number, chance in enumerate(chances[: self._most], start=1):
            gain += chance
            charge = self.times.charge(decodes, number)
            if charge > account.balance or (chance < 0.01 and number > 1):
                break
            if gain - charge > best or number == 1:
                count, best = number, gain - charge
        return count

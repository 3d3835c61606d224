"""The interface of drafters, which guess the next tokens of decoding requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..batch.scheduled import Draft, ScheduledBatch
from ..requests.generation import Generation


@dataclass(frozen=True, slots=True)
class Proposal:
    """A draft, best guesses first. chances: the drafter's own estimate, for each guess, of the probability that it and
    all guesses that it follows are accepted.

    The sum of `chances` decides whether the draft, and how many of its guesses, are worth the longer step.
    """

    draft: Draft
    chances: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Wish:
    """A request that may draft now, at most `count` guesses. rate: the recent share of right guesses, among those whose
    predecessors were right."""

    generation: Generation
    count: int
    rate: float


class Drafter:
    """One method to guess. `forget` drops everything that it keeps for a request.

    A drafter must define `name`, `first_rate` and `propose`; the other methods do nothing by default. All calls come
    from one thread.
    """

    name: str
    first_rate: float  # the initial `Account.rate`, before anything is known: a probability above 0
    observes = False  # whether it needs `observe`
    follows = False  # whether it needs `follow`
    needs_choices = False  # whether it needs `take_choices`
    # Whether it also guesses to learn, so that a draft is worth more than the sum of its chances: then a request's
    # account decides how many guesses there are, and drafts without any chance do not count as misses.
    explores = False
    stake = 0.0  # tokens of plain decoding that the first requests together may lose beyond their own accounts

    def propose(self, wishes: Sequence[Wish]) -> Mapping[int, Proposal]:
        """Guesses by request id, after the tokens `generation.prompt` and `generation.token_ids`, at most `count` of
        its wish for each request. Requests for which the drafter has no guess are left out."""
        raise NotImplementedError

    def backlog(self, generation: Generation) -> int:
        """How many of the request's tokens the drafter must read before it can guess."""
        return 0

    def read(self, generation: Generation) -> None:
        """Read the backlog now, so that the next guess takes no longer than usual."""

    def knows(self, generation: Generation) -> bool:
        """A quick check: False if `propose` would certainly have no guess for the request."""
        return True

    def observe(self, rows: Mapping[int, int], batch_size: int) -> None:
        """Called after a step. rows: request id -> the logit row after its newest token, for requests that may draft
        next.

        The call comes before the next step, of `batch_size` sequences, overwrites the results of this one.
        """

    def follow(self, batch: ScheduledBatch, generations: Mapping[int, Generation]) -> None:
        """Called after every step, while its results are still in memory, whether or not any request may draft. The
        requests in it that sample have its tokens. For such a drafter no step is started before the previous one has
        ended."""

    def take_choices(self, batch: ScheduledBatch, choices: Mapping[int, Sequence[int]]) -> None:
        """Called after a step. choices: for each request with a draft, the model's token after its last token and after
        each guess, -1 if the logits are not numbers. On a device that samples, these are sampled tokens."""

    def forget(self, request_id: int) -> None:
        """Drop a request that has ended, by its own end or by cancellation."""

    def close(self) -> None:
        """Free what the drafter owns."""


def chain_chances(length: int, rate: float) -> tuple[float, ...]:
    """For each guess of a chain, the probability that it and all before are right; rate: the probability of one guess
    if all before are right."""
    return tuple(rate ** (depth + 1) for depth in range(length))

"""What a drafter is: whatever guesses the next tokens of requests that decode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..batch.scheduled import Draft, ScheduledBatch
from ..requests.generation import Generation


@dataclass(frozen=True, slots=True)
class Proposal:
    """A draft, best guesses first, and how likely each is accepted by the drafter's own account, with all before it.

    What `chances` add up to decides whether the draft is worth the longer step, and how many of its guesses are.
    """

    draft: Draft
    chances: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Wish:
    """A request that may draft now: at most `count` guesses; `rate` is the share of guesses at depth 1, of those at
    depth 2 whose predecessor was right, and so on, that were right lately."""

    generation: Generation
    count: int
    rate: float


class Drafter:
    """One way to guess. Everything that it keeps of a request goes with `forget`.

    A drafter gives `name`, `first_rate` and `propose`; the other methods do nothing where it does not give them. All
    calls come from one thread.
    """

    name: str
    first_rate: float  # the `Account.rate` of the first request, of which nothing is known yet: a probability above 0
    observes = False  # whether it needs `observe`
    follows = False  # whether it needs `follow`
    needs_choices = False  # whether it needs `take_choices`
    # Whether it guesses to learn as well, so that a draft is worth more than its chances add up to: then a request's
    # account says how many guesses there are, and drafts without any chance are no misses.
    explores = False
    stake = 0.0  # tokens of plain decoding that the first requests may lose beyond their own, all together

    def propose(self, wishes: Sequence[Wish]) -> Mapping[int, Proposal]:
        """Guesses by request id, behind the tokens `generation.prompt` and `generation.token_ids`: no more of a
        request than its wish counts. Requests about which the drafter knows nothing are left out."""
        raise NotImplementedError

    def backlog(self, generation: Generation) -> int:
        """How many of the request's tokens it would have to read before it can guess."""
        return 0

    def read(self, generation: Generation) -> None:
        """Read the backlog now, so that guessing takes no longer than usual."""

    def knows(self, generation: Generation) -> bool:
        """False where `propose` would have nothing, as far as that is found out sooner than by asking for it."""
        return True

    def observe(self, rows: Mapping[int, int], batch_size: int) -> None:
        """A step has run: request -> the logit row behind its newest token, for the requests that may draft next.

        Called before the next step, of `batch_size` sequences, overwrites what this one computed.
        """

    def follow(self, batch: ScheduledBatch, generations: Mapping[int, Generation]) -> None:
        """A step has run, and what it computed is still there; the requests in it that sample have its tokens. Called
        after every step, whether or not anybody may draft: no step is started before the one before it has ended."""

    def take_choices(self, batch: ScheduledBatch, choices: Mapping[int, Sequence[int]]) -> None:
        """A step has run: of each request that had a draft, the token that the model has behind its last token and
        behind each guess, -1 where its logits are not numbers. What is sampled on the device is so here as well."""

    def forget(self, request_id: int) -> None:
        """The request has ended: its answer is whole, or nobody waits for it any more."""

    def close(self) -> None:
        """Free what the drafter owns."""


def chain_chances(length: int, rate: float) -> tuple[float, ...]:
    """How probable each guess of a chain is right, if it is so with probability `rate` where all before are."""
    return tuple(rate ** (depth + 1) for depth in range(length))

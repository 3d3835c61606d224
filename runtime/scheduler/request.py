"""The scheduler's record of one request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ..batch.scheduled import NO_EXTRAS, Draft, Extras
from ..kv.config import Demand
from ..kv.sequence import CachedSequence

if TYPE_CHECKING:
    from .beams import Beams


class RequestSpec(NamedTuple):
    """A request as it is added to the scheduler.

    priority: lower numbers run first; at equal priority clients are served fairly, and one client's requests in order
    of arrival. max_new_tokens: the most tokens to sample; 0 for a request that only wants the logits of its prompt.
    all_logits: whether the logits of every token are wanted. first_row: whether those of the first token are wanted;
    the whole request then runs in one step. salt: only requests with the same salt share KV blocks. own_salt, own_from,
    salt_from: see CachedSequence. use_cache: False: compute every token even if its KV is cached. first_turn: the
    length in tokens of a conversation's first turn, 0 if the prompt is none. extras: inputs per token besides ids;
    requests with other extras have another salt. beams: the number of beams; 1 without beam search.
    """

    request_id: int
    token_ids: tuple[int, ...]
    max_new_tokens: int
    priority: int = 0
    salt: bytes = b""
    all_logits: bool = False
    use_cache: bool = True
    client: str = ""
    first_row: bool = False
    first_turn: int = 0
    extras: Extras = NO_EXTRAS
    own_salt: bytes = b""
    own_from: int = 0
    beams: int = 1
    salt_from: int = 0

    @property
    def max_cached_tokens(self) -> int:
        """The most tokens whose KV the request may need; the last sampled token is never computed."""
        return len(self.token_ids) + max(self.max_new_tokens - 1, 0)

    @property
    def demand(self) -> Demand:
        """The most that it needs of the KV cache."""
        return Demand(self.max_cached_tokens, len(self.token_ids), self.beams)

    @property
    def cost(self) -> int:
        """How many tokens it asks for, as its cost for fair sharing."""
        return len(self.token_ids) + self.max_new_tokens * self.beams


@dataclass(slots=True, eq=False, kw_only=True)
class ScheduledRequest(CachedSequence):
    """A request in the scheduler: its tokens, how many of them are computed, and its blocks.

    Prefill and decode differ only in `num_computed_tokens`: a step runs some of the tokens after it, and samples when
    it reaches the last one. Blocks that are full of computed tokens are never written again.

    beams: the beams of the request, None without beam search; this is sequence number `beam`. folded: it reads the
    prompt for all beams, and its logits are not wanted. parted: whether its last block may be shared with another beam.
    """

    spec: RequestSpec
    arrival: int
    start: int = 0  # start tag of fair queueing
    draft: Draft | None = None  # guesses verified in the current step
    num_preemptions: int = 0
    beams: Beams | None = None
    beam: int = 0
    folded: bool = False
    parted: bool = False

    @property
    def id(self) -> int:
        """The request's id."""
        return self.spec.request_id

    @property
    def rank(self) -> tuple[int, int, int, int]:
        """The order of service: the smallest tuple is served first, the largest preempted first. Beams are adjacent."""
        return (self.spec.priority, self.start, self.arrival, self.beam)

    @property
    def num_remaining(self) -> int:
        """How many tokens must be computed before the next one can be sampled."""
        return len(self.tokens) - self.num_computed_tokens

    @property
    def num_started_tokens(self) -> int:
        """How many tokens are computed, or will be by the steps in flight."""
        return self.num_computed_tokens + self.num_scheduled_tokens

    @property
    def num_unscheduled(self) -> int:
        """How many known tokens are neither computed nor in a step in flight."""
        return len(self.tokens) - self.num_computed_tokens - self.num_scheduled_tokens

    @property
    def is_last_step(self) -> bool:
        """Whether the step in flight, which computes its last known token, is its last one, whatever it samples."""
        return len(self.tokens) - len(self.spec.token_ids) + 1 >= self.spec.max_new_tokens

    @property
    def num_new_tokens(self) -> int:
        """How many tokens were sampled or accepted after the prompt."""
        return len(self.tokens) - len(self.spec.token_ids)

    @property
    def num_unused_tokens(self) -> int:
        """How many requested tokens were not sampled."""
        return max(self.spec.max_new_tokens - self.num_new_tokens, 0) * self.spec.beams

    def take_accepted(self, accepted: tuple[int, ...], again: bool) -> list[tuple[int, int]]:
        """Append the accepted guesses of the draft, whose KV is computed; returns the moves (from place, to place) of
        their KV. again: they must be computed again, because no state was stored after them."""
        draft, first = self.draft, self.num_computed_tokens
        assert draft is not None and len(accepted) <= len(draft)
        self.tokens += [draft.token_ids[guess] for guess in accepted]
        if again:
            return []
        self.num_computed_tokens += len(accepted)
        places = enumerate(accepted)  # indices of guesses ascend, so that none is overwritten before it is moved
        return [(first + guess, first + depth) for depth, guess in places if guess != depth]

    def stop(self) -> None:
        """Clear the facts about steps: the request does not run any more."""
        self.draft = None
        self.num_scheduled_tokens = 0

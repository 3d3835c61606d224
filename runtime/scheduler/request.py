"""The scheduler's view of one request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ..batch.scheduled import NO_EXTRAS, Draft, Extras
from ..kv.config import Demand
from ..kv.sequence import CachedSequence

if TYPE_CHECKING:
    from .beams import Beams


class RequestSpec(NamedTuple):
    """A request as it is added.

    priority: lower runs first; among equals the clients are served fairly, and one client's requests in order of
    arrival. max_new_tokens: how many tokens may be sampled; 0 for a request that only wants the logits of its prompt.
    all_logits: the logits of every token are wanted. first_row: those of the first one, where all of it runs in one
    step. salt: requests share KV blocks only with requests of the same salt. own_salt, own_from,
    salt_from: see CachedSequence.
    use_cache: False to compute every token even if its KV is cached. first_turn: how many tokens the first turn of a
    conversation has, where the prompt is one. extras: what it gives per token besides ids; requests of other extras
    have another salt. beams: in how many ways it goes on at once behind its prompt.
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
        """Tokens whose KV the request may need at most: the last sampled token is never computed."""
        return len(self.token_ids) + max(self.max_new_tokens - 1, 0)

    @property
    def demand(self) -> Demand:
        """What it needs of the KV cache at most."""
        return Demand(self.max_cached_tokens, len(self.token_ids), self.beams)

    @property
    def cost(self) -> int:
        """Tokens that it asks for."""
        return len(self.token_ids) + self.max_new_tokens * self.beams


@dataclass(slots=True, eq=False, kw_only=True)
class ScheduledRequest(CachedSequence):
    """A request in the scheduler: its tokens, how many of them are computed, and its blocks.

    `num_computed_tokens` is all there is to prefill and decode: a step runs some of the tokens after it, and samples
    when it reaches the last one. Blocks that are full of computed tokens are never written again.

    beams: of a request that goes on in several ways, of whose sequences this is number `beam`. folded: it reads the
    prompt for all of them, and nobody wants its logits. parted: its last block may be another's, too.
    """

    spec: RequestSpec
    arrival: int
    start: int = 0  # tag of fair queueing
    draft: Draft | None = None  # verified in the step under way
    num_preemptions: int = 0
    beams: Beams | None = None
    beam: int = 0
    folded: bool = False
    parted: bool = False

    @property
    def id(self) -> int:
        """The number by which everybody knows the request."""
        return self.spec.request_id

    @property
    def rank(self) -> tuple[int, int, int, int]:
        """The order of service; smaller is served first and preempted last. Beams of a request stand together."""
        return (self.spec.priority, self.start, self.arrival, self.beam)

    @property
    def num_remaining(self) -> int:
        """Tokens to compute before the next one can be sampled."""
        return len(self.tokens) - self.num_computed_tokens

    @property
    def num_started_tokens(self) -> int:
        """Tokens that are computed, or will be by the steps under way."""
        return self.num_computed_tokens + self.num_scheduled_tokens

    @property
    def num_unscheduled(self) -> int:
        """Known tokens that no step has computed or is about to."""
        return len(self.tokens) - self.num_computed_tokens - self.num_scheduled_tokens

    @property
    def is_last_step(self) -> bool:
        """Whether the step under way, which computes its last token, is its last, whatever it samples."""
        return len(self.tokens) - len(self.spec.token_ids) + 1 >= self.spec.max_new_tokens

    @property
    def num_new_tokens(self) -> int:
        """Tokens that were sampled or accepted behind the prompt."""
        return len(self.tokens) - len(self.spec.token_ids)

    @property
    def num_unused_tokens(self) -> int:
        """Tokens that were asked for and not sampled."""
        return max(self.spec.max_new_tokens - self.num_new_tokens, 0) * self.spec.beams

    def take_accepted(self, accepted: tuple[int, ...], again: bool) -> list[tuple[int, int]]:
        """Count the accepted guesses of the draft as tokens whose KV is there; from which place each must be moved, and
        where to. again: they are computed once more, as no state was left behind them."""
        draft, first = self.draft, self.num_computed_tokens
        assert draft is not None and len(accepted) <= len(draft)
        self.tokens += [draft.token_ids[guess] for guess in accepted]
        if again:
            return []
        self.num_computed_tokens += len(accepted)
        places = enumerate(accepted)  # guesses ascend, so that none is overwritten before it is moved
        return [(first + guess, first + depth) for depth, guess in places if guess != depth]

    def stop(self) -> None:
        """It runs no more: nothing of it is in a step."""
        self.draft = None
        self.num_scheduled_tokens = 0

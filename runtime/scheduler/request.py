"""The scheduler's view of one request."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..batch.scheduled import Draft
from ..kv.prefix_cache import BlockKey, child_key, root_key


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """A request as it is added.

    priority: lower runs first; among equals the clients are served fairly, and one client's requests in order of
    arrival. max_new_tokens: how many tokens may be sampled; 0 for a
    request that only wants the logits of its prompt. all_logits: the logits of every token are wanted. salt: requests
    share KV blocks only with requests of the same salt. use_cache: False to compute every token even if its KV is
    cached.
    """

    request_id: int
    token_ids: tuple[int, ...]
    max_new_tokens: int
    priority: int = 0
    salt: bytes = b""
    all_logits: bool = False
    use_cache: bool = True
    client: str = ""


@dataclass(slots=True, eq=False)
class Request:
    """A request in the scheduler: its tokens, how many of them are computed, and its blocks.

    `num_computed_tokens` is all there is to prefill and decode: a step runs some of the tokens after it, and samples
    when it reaches the last one. Blocks `0 .. num_computed_tokens // block_size - 1` are full and never written again.
    """

    spec: RequestSpec
    arrival: int
    start: int = 0  # tag of fair queueing
    tokens: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_scheduled_tokens: int = 0  # in the step under way
    num_ahead_tokens: int = 0  # in the step after it, where that was scheduled already
    draft: Draft | None = None  # verified in the step under way
    num_preemptions: int = 0
    block_table: list[int] = field(default_factory=list)
    host_slots: list[int] = field(default_factory=list)  # of a waiting request: its first blocks in host memory
    num_saved_tokens: int = 0  # computed ones that those hold
    num_published: int = 0  # blocks at the front of the table that the prefix cache has seen
    keys: list[BlockKey] = field(default_factory=list)  # of the full blocks of `tokens`, as far as asked for
    _table_tuple: tuple[int, ...] = ()

    @property
    def id(self) -> int:
        return self.spec.request_id

    @property
    def rank(self) -> tuple[int, int, int]:
        """The order of service; smaller is served first and preempted last."""
        return (self.spec.priority, self.start, self.arrival)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_remaining(self) -> int:
        """Tokens to compute before the next one can be sampled."""
        return len(self.tokens) - self.num_computed_tokens

    @property
    def num_new_tokens(self) -> int:
        return len(self.tokens) - len(self.spec.token_ids)

    @property
    def num_unused_tokens(self) -> int:
        """Tokens that were asked for and not sampled."""
        return max(self.spec.max_new_tokens - self.num_new_tokens, 0)

    @property
    def max_cached_tokens(self) -> int:
        """Tokens whose KV the request may need at most: the last sampled token is never computed."""
        return len(self.spec.token_ids) + max(self.spec.max_new_tokens - 1, 0)

    def table(self) -> tuple[int, ...]:
        """The block table as a tuple; the same object as long as it has not changed, so that copies can be saved."""
        if len(self._table_tuple) != len(self.block_table):
            self._table_tuple = tuple(self.block_table)
        return self._table_tuple

    def take_accepted(self, accepted: tuple[int, ...], block_size: int) -> list[tuple[int, int]]:
        """Count the accepted guesses of the draft as tokens whose KV is there; the moves that bring it to its place."""
        draft, first = self.draft, self.num_computed_tokens
        assert draft is not None and len(accepted) <= len(draft)

        def slot(place: int) -> int:
            return self.block_table[place // block_size] * block_size + place % block_size

        self.tokens += [draft.token_ids[guess] for guess in accepted]
        self.num_computed_tokens += len(accepted)
        places = enumerate(accepted)  # guesses ascend, so that none is overwritten before it is moved
        return [(slot(first + guess), slot(first + depth)) for depth, guess in places if guess != depth]

    def cut_table(self, length: int) -> list[int]:
        """Take the blocks behind the first `length` out of the table (the caller releases them)."""
        cut = self.block_table[length:]
        if cut:
            del self.block_table[length:]
            self._table_tuple = ()
        return cut

    def clear_table(self) -> None:
        """Forget the blocks and everything computed in them (the caller releases them)."""
        self.block_table.clear()
        self._table_tuple = ()
        self.draft = None
        self.num_computed_tokens = self.num_scheduled_tokens = self.num_ahead_tokens = self.num_published = 0

    def key(self, index: int, block_size: int) -> BlockKey:
        """The prefix-cache key of full block `index`."""
        while len(self.keys) <= index:
            parent = self.keys[-1] if self.keys else root_key(self.spec.salt)
            first = len(self.keys) * block_size
            self.keys.append(child_key(parent, self.tokens[first : first + block_size]))
        return self.keys[index]

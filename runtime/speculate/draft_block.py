"""A draft layer in the engine guesses a block of tokens at once (DFlash, Chen et al. 2026): in one step it reads the
hidden states of tokens that it has not read yet, then, without hidden states, the newest token and mask tokens for the
rest of the block.

The keys and values of the tokens it has read are in the engine's KV cache, as in `LayerDrafter`. Those of a block come
after them until the step has ended: in the request's own KV blocks, then in spare blocks that belong to no request.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..batch.scheduled import Draft, ScheduledBatch, ScheduledSequence
from ..executor.base import LayeredExecutor
from ..executor.sampling import greedy_tokens
from .draft_layer import LayerDrafter, Unread, extras
from .drafter import Proposal, Wish, chain_chances

Block = tuple[Wish, Unread, int]  # a request, its unread hidden states, and the number of tokens of its block


class BlockDrafter(LayerDrafter):
    """Reads the hidden states of every step, at once or later, and guesses blocks of tokens."""

    def __init__(
        self,
        executor: LayeredExecutor,
        block_sizes: Sequence[int],
        name: str,
        block: int,
        mask_token: int,
        max_seq_len: int,
    ) -> None:
        """block, mask_token: see Speculation."""
        super().__init__(executor, block_sizes, name)
        self._block, self._mask, self._longest = block, mask_token, max_seq_len
        self._spare = executor.spare_blocks

    def propose(self, wishes: Sequence[Wish]) -> dict[int, Proposal]:
        wishes = [wish for wish in wishes if self._follows(wish)]
        waiting = [w for w in wishes if self._unread[w.generation.request_id].waiting > self._block]
        self._read({w.generation.request_id: w.generation for w in waiting})  # else a block might not fit the step
        found: dict[int, Proposal] = {}
        for blocks in self._steps(wishes):
            guesses = iter(self._run(blocks))
            for wish, unread, count in blocks:
                self._unread[wish.generation.request_id] = unread.all_read()
                guessed = [next(guesses) for _ in range(count - 1)][: wish.count]
                chances = chain_chances(len(guessed), wish.rate)
                found[wish.generation.request_id] = Proposal(Draft.chain(guessed), chances)
        return found

    def _follows(self, wish: Wish) -> bool:
        """Whether the newest hidden state belongs to the token before the request's newest token."""
        request_id, generation = wish.generation.request_id, wish.generation
        text = len(generation.prompt) + len(generation.token_ids)
        return request_id in self._unread and self._is_current(request_id, text)

    def _run(self, blocks: Sequence[Block]) -> list[int]:
        """Guess these blocks in one step; returns the guessed tokens of all blocks, joined."""
        parts, taken = list[ScheduledSequence](), [0] * len(self._block_sizes)
        for wish, unread, count in blocks:
            generation, tables = wish.generation, self._tables(unread, count, taken)
            tokens = (*[*generation.prompt, *generation.token_ids][unread.read :], *[self._mask] * (count - 1))
            hidden, number = extras(unread.start, unread.rows), generation.request_id
            parts.append(
                ScheduledSequence(number, tokens, unread.read, tables, count - 1, None, False, unread.prompt, hidden)
            )
        return greedy_tokens(self._executor, ScheduledBatch(tuple(parts)))

    def _steps(self, wishes: Sequence[Wish]) -> Iterator[list[Block]]:
        """The blocks that can be guessed, grouped into steps that they fit."""
        executor, step = self._executor, list[Block]()
        every = [executor.max_batch_size, executor.max_step_tokens, executor.max_logit_rows, *map(len, self._spare)]
        left = list(every)
        for wish in wishes:
            unread = self._unread[wish.generation.request_id]
            count = self._count(unread)
            if count < 2:
                continue
            need = [1, unread.waiting + count, count - 1, *self._missing(unread, count)]
            if any(more > have for more, have in zip(need, left, strict=True)):
                yield step
                step, left = [], list(every)
            step.append((wish, unread, count))
            left = [have - more for have, more in zip(left, need, strict=True)]
        if step:
            yield step

    def _count(self, unread: Unread) -> int:
        """How many tokens a request's block may have."""
        executor = self._executor
        count = min(self._block, self._longest - unread.end, executor.max_logit_rows + 1)
        count = min(count, executor.max_step_tokens - unread.waiting)
        for table, size, more in zip(unread.tables, self._block_sizes, self._spare, strict=True):
            count = min(count, (len(table) + len(more)) * size - unread.end)
        return count

    def _missing(self, unread: Unread, count: int) -> list[int]:
        """How many KV blocks of each group a request lacks for a block of `count` tokens."""
        needed = (-(-(unread.end + count) // size) for size in self._block_sizes)
        return [max(have - len(table), 0) for have, table in zip(needed, unread.tables, strict=True)]

    def _tables(self, unread: Unread, count: int, taken: list[int]) -> tuple[tuple[int, ...], ...]:
        """A request's tables, extended by spare blocks. taken: how many spare blocks of each group are in use; it is
        updated."""
        tables: list[tuple[int, ...]] = []
        for group, (table, more) in enumerate(zip(unread.tables, self._missing(unread, count), strict=True)):
            own = self._spare[group][taken[group] : taken[group] + more]
            tables.append((*table, *own))
            taken[group] += more
        return tuple(tables)

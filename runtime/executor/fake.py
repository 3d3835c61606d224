"""FakeExecutor: a model of two lines, for tests of everything above the executor."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ..scheduler.batch import ScheduledBatch


def successor(context: Sequence[int], vocab_size: int) -> int:
    """The next token is the last one plus one."""
    return (context[-1] + 1) % vocab_size


def context_hash(context: Sequence[int], vocab_size: int) -> int:
    """The next token depends on every token before it, so that one wrong KV entry shows."""
    state = 0
    for token in context:
        state = (state * 31 + token + 7) % 1_000_003
    return state % vocab_size


class FakeExecutor:
    """Keeps token ids where a model keeps keys and values, and reads every context back through the block tables.

    The logits are 10 at `rule(context)` and 0 elsewhere. `nan_after` is a token id whose successor's logits are NaN.
    """

    def __init__(
        self,
        *,
        vocab_size: int = 64,
        num_blocks: int = 64,
        block_size: int = 4,
        max_batch_size: int = 8,
        max_step_tokens: int = 16,
        max_logit_rows: int = 16,
        rule: Callable[[Sequence[int], int], int] = successor,
        nan_after: int | None = None,
    ) -> None:
        self.vocab_size, self.num_blocks, self.block_size = vocab_size, num_blocks, block_size
        self.max_batch_size, self.max_step_tokens, self.max_logit_rows = max_batch_size, max_step_tokens, max_logit_rows
        self.rule = rule
        self.nan_after = nan_after
        self.cache = np.full(num_blocks * block_size, -1, dtype=np.int64)
        self.batches: list[ScheduledBatch] = []
        self.closed = False

    def step(self, batch: ScheduledBatch) -> np.ndarray:
        """Check the batch against the limits, write its tokens to the cache, and give the rule's logits."""
        assert 0 < batch.num_tokens <= self.max_step_tokens
        assert len(batch.sequences) <= self.max_batch_size and batch.num_logit_rows <= self.max_logit_rows
        self.batches.append(batch)
        written: set[int] = set()
        rows: list[np.ndarray] = []
        for sequence in batch.sequences:
            slots = [self._slot(sequence.block_table, position) for position in range(sequence.end)]
            new = slots[sequence.start :]
            assert not written.intersection(new), "two sequences write the same slot"
            written.update(new)
            self.cache[new] = sequence.token_ids
            context = self.cache[slots].tolist()
            assert min(context) >= 0, "a slot is read before it is written"
            for row in range(sequence.num_logits):
                rows.append(self._logits(context[: sequence.end - sequence.num_logits + 1 + row]))
        return np.stack(rows) if rows else np.zeros((0, self.vocab_size), dtype=np.float32)

    def _slot(self, table: tuple[int, ...], position: int) -> int:
        return table[position // self.block_size] * self.block_size + position % self.block_size

    def _logits(self, context: list[int]) -> np.ndarray:
        row = np.zeros(self.vocab_size, dtype=np.float32)
        row[self.rule(context, self.vocab_size)] = 10
        if context[-1] == self.nan_after:
            row[3] = np.nan
        return row

    def close(self) -> None:
        self.closed = True

"""Executor: what runs a scheduled batch. The only part of the runtime that touches a device."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from ..scheduler.batch import ScheduledBatch


class Executor(Protocol):
    """Owns the KV cache of `num_blocks` blocks of `block_size` tokens, and runs steps within its limits.

    host_blocks: how many blocks it can keep in host memory for preempted requests; 0 where the cache is host memory.
    """

    @property
    def num_blocks(self) -> int: ...

    @property
    def host_blocks(self) -> int: ...

    @property
    def block_size(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_batch_size(self) -> int: ...

    @property
    def max_step_tokens(self) -> int: ...

    @property
    def max_logit_rows(self) -> int: ...

    def step(self, batch: ScheduledBatch) -> np.ndarray:
        """Run one step: writes the KV of its tokens, returns float32 `[batch.num_logit_rows, vocab]`.

        The array is valid until the next step.
        """
        ...

    def close(self) -> None:
        """Free everything. Calling it again does nothing."""
        ...

"""Executor: what runs a scheduled batch. The only part of the runtime that touches a device."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np

from ..batch.scheduled import ScheduledBatch
from ..kv.group import GroupConfig


class Executor(Protocol):
    """Owns the KV cache, and runs steps within its limits.

    groups: how many blocks of each KV group there are. No host_blocks where the cache is host memory.
    """

    @property
    def groups(self) -> tuple[GroupConfig, ...]: ...

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


@runtime_checkable
class ScreeningExecutor(Protocol):
    """An executor that may do with less work where only the largest logit of each row is wanted.

    screens: whether it can for its engine.
    """

    @property
    def screens(self) -> bool: ...

    def step_greedy(self, batch: ScheduledBatch) -> np.ndarray:
        """As `Executor.step`, but of each row only the largest logit is right; any other may be minus infinity."""
        ...


def screening(executor: Executor) -> ScreeningExecutor | None:
    """The executor, if it has a cheaper step where only the largest logit of each row is wanted."""
    return executor if isinstance(executor, ScreeningExecutor) and executor.screens else None

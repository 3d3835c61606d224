"""Executor: runs scheduled batches. It is the only part of the runtime that touches a device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from ..batch.scheduled import ScheduledBatch
from ..format.adapters import AdapterPlan
from ..format.batch import BatchArray
from ..kv.config import GroupConfig

if TYPE_CHECKING:
    import numpy as np

    from .rank_processes import RankProcesses


class Executor(Protocol):
    """Owns the KV cache, and runs steps within its limits.

    groups: the KV groups, each with its number of blocks; host_blocks is 0 if the cache is host memory. inputs: the
    arrays that a request may give per token besides its ids, see `ScheduledSequence.extras`.
    """

    @property
    def groups(self) -> tuple[GroupConfig, ...]:
        """The KV groups, and how many blocks each has."""
        ...

    @property
    def inputs(self) -> tuple[BatchArray, ...]:
        """The arrays that a request may give per token besides its ids."""
        ...

    @property
    def vocab_size(self) -> int:
        """The number of columns of the logits."""
        ...

    @property
    def max_batch_size(self) -> int:
        """The largest number of sequences in a step."""
        ...

    @property
    def max_step_tokens(self) -> int:
        """The largest number of tokens in a step."""
        ...

    @property
    def max_logit_rows(self) -> int:
        """The largest number of logit rows in a step."""
        ...

    def step(self, batch: ScheduledBatch) -> np.ndarray:
        """Run one step: writes the KV of its tokens, returns float32 `[batch.num_logit_rows, vocab]`.

        The array is valid until the next step.
        """
        ...

    def close(self) -> None:
        """Free everything. Calling it again does nothing."""
        ...


@runtime_checkable
class AdaptingExecutor(Protocol):
    """An executor whose engine may have room for adapters.

    adapters: the room; None if the engine has none.
    """

    @property
    def adapters(self) -> AdapterPlan | None:
        """The engine's room for adapters; None if it has none."""
        ...

    def write_pool(self, name: str, offset: int, values: np.ndarray, only: int = -1) -> None:
        """Write contiguous `values` of any shape at byte `offset` of a pool, on rank `only` or on all ranks (-1). No
        running step may read that place. Any thread may call this."""
        ...


@runtime_checkable
class KVExecutor(Protocol):
    """An executor whose KV blocks can be read and written between steps, if its cache is host memory."""

    @property
    def groups(self) -> tuple[GroupConfig, ...]:
        """The KV groups, as `Executor.groups`."""
        ...

    @property
    def kv_in_reach(self) -> bool:
        """Whether the whole KV cache lies in this process's memory."""
        ...

    def kv_views(self, group: int, block: int) -> list[memoryview]:
        """The bytes of a block in each layer of its group, writable, valid until the next step."""
        ...


@runtime_checkable
class GreedyExecutor(Protocol):
    """An executor that may do less work if only the largest logit of each row is wanted.

    chooses: whether it finds the largest logits itself.
    """

    @property
    def chooses(self) -> bool:
        """Whether it finds the token with the largest logit of each row itself."""
        ...

    def step_greedy(self, batch: ScheduledBatch) -> list[int]:
        """As `Executor.step`, but returns for each logit row only the token of the largest logit (the first of equals),
        or -1 if the largest is not finite."""
        ...


@runtime_checkable
class MergingExecutor(Protocol):
    """An executor that may do less work if only the few largest logits of each row are wanted.

    most_wanted: how many of the largest it can look for; 0 if this saves no work.
    """

    @property
    def most_wanted(self) -> int:
        """The largest number of a row's largest logits that it can look for."""
        ...

    def step_largest(self, batch: ScheduledBatch, wanted: int) -> np.ndarray:
        """As `Executor.step`, but only the `wanted` largest logits of each row (the first of equals) are guaranteed;
        all others may be minus infinity."""
        ...


@runtime_checkable
class PipelinedExecutor(Protocol):
    """An executor whose parts form a pipeline, so that several steps may be in flight: a part begins the next step
    while later parts still work on the previous one. All parts run steps in the order in which they began.

    flights: how many steps may be in flight; 1 if it is no pipeline.
    """

    @property
    def flights(self) -> int:
        """How many steps may be in flight."""
        ...

    def begin(self, batch: ScheduledBatch, greedy: bool) -> Any:
        """Begin a step; returns when the first part has run it. greedy: only the largest logit of each row is
        wanted."""
        ...

    def end(self, ticket: Any) -> tuple[list[int], np.ndarray | None]:
        """Wait for the oldest step in flight. Returns the token of the largest logit of each row, as `step_greedy`, and
        None; or no tokens and the logits, float32 `[rows, vocab]`, valid until `flights` more steps are begun."""
        ...


@runtime_checkable
class SectionExecutor(Protocol):
    """An executor that runs sections of its program after a step, see `Section`."""

    def run(self, section: str, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Run a section on some rows of the last step; returns copies of its outputs by name, `[rows, ...]`.

        inputs: its inputs by name, one row each, float32 or int32. ASKED_ROWS are indices of logit rows of the step.
        UsageError if there is no such section, or if its inputs are others.
        """
        ...


@runtime_checkable
class LayeredExecutor(Executor, SectionExecutor, Protocol):
    """An executor whose batches may run a section in place of the whole program; the section has outputs besides
    logits.

    spare_blocks: for each KV group, the numbers of blocks that belong to no request, for KV that is not kept after a
    step.
    """

    @property
    def spare_blocks(self) -> tuple[range, ...]:
        """The blocks of each KV group that belong to no request."""
        ...

    def given(self, name: str) -> np.ndarray:
        """A copy of an output, besides logits, of the section that ran as the last step, `[num_logit_rows, ...]`."""
        ...


@runtime_checkable
class RankedExecutor(Protocol):
    """An executor whose steps may be run by several processes.

    ranks: the other ranks' processes; None if it runs alone.
    """

    @property
    def ranks(self) -> RankProcesses | None:
        """The processes of ranks 1 and up; None if the engine runs in this process alone."""
        ...


def greedy(executor: Executor) -> GreedyExecutor | None:
    """The executor, if it saves work when only the largest logit of each row is wanted; else None."""
    return executor if isinstance(executor, GreedyExecutor) and executor.chooses else None


def pipelined(executor: Executor) -> PipelinedExecutor | None:
    """The executor, if several steps may be in flight; else None."""
    return executor if isinstance(executor, PipelinedExecutor) and executor.flights > 1 else None


def merging(executor: Executor) -> MergingExecutor | None:
    """The executor, if it saves work when only a few of the largest logits of each row are wanted; else None."""
    return executor if isinstance(executor, MergingExecutor) and executor.most_wanted else None


def ranks(executor: Executor) -> RankProcesses | None:
    """The other processes that run the executor's steps; None if it runs in this process alone."""
    return executor.ranks if isinstance(executor, RankedExecutor) else None

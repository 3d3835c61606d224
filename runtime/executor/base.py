"""Executor: what runs a scheduled batch. The only part of the runtime that touches a device."""

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

    groups: how many blocks of each KV group there are. No host_blocks where the cache is host memory. inputs: what a
    request may give per token besides its ids, see `ScheduledSequence.extras`.
    """

    @property
    def groups(self) -> tuple[GroupConfig, ...]:
        """The KV groups, and how many blocks each has."""
        ...

    @property
    def inputs(self) -> tuple[BatchArray, ...]:
        """What a request may give per token besides its ids."""
        ...

    @property
    def vocab_size(self) -> int:
        """Columns of the logits."""
        ...

    @property
    def max_batch_size(self) -> int:
        """Sequences of a step, at most."""
        ...

    @property
    def max_step_tokens(self) -> int:
        """Tokens of a step, at most."""
        ...

    @property
    def max_logit_rows(self) -> int:
        """Rows of logits of a step, at most."""
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

    adapters: that room; None for none.
    """

    @property
    def adapters(self) -> AdapterPlan | None:
        """The engine's room for adapters; None for none."""
        ...

    def write_pool(self, name: str, offset: int, values: np.ndarray, only: int = -1) -> None:
        """Put contiguous `values` of any shape at byte `offset` of a pool, of one rank or of all (-1), where no step
        that is under way reads. Any thread may."""
        ...


@runtime_checkable
class KVExecutor(Protocol):
    """An executor whose KV blocks can be read and written between steps, where its cache is host memory."""

    @property
    def groups(self) -> tuple[GroupConfig, ...]:
        """The KV groups, as `Executor` has them."""
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
    """An executor that may do with less work where only the largest logit of each row is wanted.

    chooses: whether it finds those itself.
    """

    @property
    def chooses(self) -> bool:
        """Whether it finds the tokens of the largest logits itself."""
        ...

    def step_greedy(self, batch: ScheduledBatch) -> list[int]:
        """As `Executor.step`, but of each logit row only the token of the largest logit (the first of equals), -1 where
        logits are not numbers."""
        ...


@runtime_checkable
class MergingExecutor(Protocol):
    """An executor that may do with less work where only some of the largest logits of each row are wanted.

    most_wanted: how many it looks for; 0 where it makes no difference.
    """

    @property
    def most_wanted(self) -> int:
        """How many of a row's largest logits it looks for, at most."""
        ...

    def step_largest(self, batch: ScheduledBatch, wanted: int) -> np.ndarray:
        """As `Executor.step`, but of each logit row only the `wanted` largest logits (the first of equals) are sure to
        be there; any other may be minus infinity."""
        ...


@runtime_checkable
class PipelinedExecutor(Protocol):
    """An executor whose parts work one behind the other, so that several steps may be under way: a part begins the next
    step while those behind it still work at the one before. All do steps in the order in which they began.

    flights: how many steps may be under way; 1 where it makes no difference.
    """

    @property
    def flights(self) -> int:
        """How many steps may be under way."""
        ...

    def begin(self, batch: ScheduledBatch, greedy: bool) -> Any:
        """Begin a step; returns when its first part is done. greedy: of each logit row only the largest is wanted."""
        ...

    def end(self, ticket: Any) -> tuple[list[int], np.ndarray | None]:
        """Wait for the oldest step that was begun: the token of the largest logit of each row, as `step_greedy` gives
        it, or else no tokens and the logits, float32 `[rows, vocab]`, valid until as many steps are begun as may be
        under way."""
        ...


@runtime_checkable
class SectionExecutor(Protocol):
    """An executor that runs sections of its program behind a step, see `Section`."""

    def run(self, section: str, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """What a section gives for some rows of the last step, by name `[rows, ...]`, copies.

        inputs: what it is given, by name, a row for each: float32 or int32. ASKED_ROWS are logit rows of the step.
        UsageError if there is no such section, or it is given something else.
        """
        ...


@runtime_checkable
class LayeredExecutor(Executor, SectionExecutor, Protocol):
    """An executor whose batches may run a section in place of the program, which gives more than logits.

    spare_blocks: of each KV group, numbers of blocks that are no request's, for what is not kept after a step.
    """

    @property
    def spare_blocks(self) -> tuple[range, ...]:
        """The blocks of each KV group that are no request's."""
        ...

    def given(self, name: str) -> np.ndarray:
        """What the section that was the last step gave besides logits, by name, `[num_logit_rows, ...]`, a copy."""
        ...


@runtime_checkable
class RankedExecutor(Protocol):
    """An executor whose steps may be run by several processes.

    ranks: those beside this one; None where it runs alone.
    """

    @property
    def ranks(self) -> RankProcesses | None:
        """The processes of ranks 1 and up; None of an engine that runs in this process alone."""
        ...


def greedy(executor: Executor) -> GreedyExecutor | None:
    """The executor, if it has a step of its own where only the largest logit of each row is wanted; else None."""
    return executor if isinstance(executor, GreedyExecutor) and executor.chooses else None


def pipelined(executor: Executor) -> PipelinedExecutor | None:
    """The executor, if several steps may be under way; else None."""
    return executor if isinstance(executor, PipelinedExecutor) and executor.flights > 1 else None


def merging(executor: Executor) -> MergingExecutor | None:
    """The executor, if it has a step of its own where only some of the largest logits of each row are wanted;
    else None."""
    return executor if isinstance(executor, MergingExecutor) and executor.most_wanted else None


def ranks(executor: Executor) -> RankProcesses | None:
    """The other processes that run the executor's steps; None where it runs in this one alone."""
    return executor.ranks if isinstance(executor, RankedExecutor) else None

"""Device: the interface between the player and the hardware that runs an engine's kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from ..format.batch import BatchLimits
from ..format.kv import KVMemory
from ..format.plan import LaunchPlan, Phase
from ..format.program import Program

if TYPE_CHECKING:
    import numpy as np

    from .rank_processes import RankProcesses


class DeviceWork(NamedTuple):
    """One run of a program over the arrays that were sent last.

    sizes: the `SIZES` of the step. phase: of the plan; None without a plan. section: a section to run instead ("": the
    device's usual step). moves_only: run only the step's moves. trees: whether a sequence verifies a tree of draft
    tokens. wanted: how many of the largest logits of each row are wanted (the first of equals); all others may be minus
    infinity. 0: all are wanted.
    """

    sizes: Mapping[str, int]
    phase: Phase | None = None
    section: str = ""
    moves_only: bool = False
    trees: bool = False
    wanted: int = 0


@runtime_checkable
class HostCache(Protocol):
    """A device whose KV cache lies in host memory."""

    def kv_views(self, offset: int, nbytes: int) -> list[memoryview]:
        """Writable uint8 views of bytes [offset, offset + nbytes) of the cache, one per rank."""
        ...


class Device(Protocol):
    """Kernels and memory of one engine, and a queue of work, which runs in order and perhaps after the call returns.

    program: the program that it runs. plan: the launches of the steps; None if a device runs a step of any size in one
    call, which makes the moves itself and samples nothing. limits: the largest step. cache: the KV cache's blocks.
    host: the blocks that host memory keeps for preempted requests; 0 blocks if nothing is swapped. turns: how many
    steps may be in flight. logits: on the host, float32 `[L, vocab]`, of the step that was waited for last.
    """

    @property
    def program(self) -> Program:
        """The program that it runs."""
        ...

    @property
    def plan(self) -> LaunchPlan | None:
        """The launches of the steps; None if a step of any size is one call."""
        ...

    @property
    def limits(self) -> BatchLimits:
        """The sizes of the largest step."""
        ...

    @property
    def cache(self) -> KVMemory:
        """The KV cache's blocks, by group."""
        ...

    @property
    def host(self) -> KVMemory:
        """The blocks that host memory keeps for preempted requests; 0 blocks if nothing is swapped."""
        ...

    @property
    def turns(self) -> int:
        """How many steps may be in flight."""
        ...

    @property
    def logits(self) -> np.ndarray:
        """Logits on the host, float32 [L, vocab], of the step that was waited for last."""
        ...

    def arrays(self, turn: int) -> Mapping[str, Any]:
        """The host's arrays of a turn, sized for the largest step: `INPUTS` and the inputs that the program declares,
        contiguous buffers of any kind; with a plan also `SAMPLING` and `SAMPLED`, numpy arrays. `INPUTS` that the
        kernels do not read may be missing."""
        ...

    def zero(self, offset: int, nbytes: int) -> None:
        """Fill bytes [offset, offset + nbytes) of the KV cache with zeros."""
        ...

    def copy(self, source: int, target: int, nbytes: int) -> None:
        """Copy `nbytes` bytes from byte `source` of the KV cache to its byte `target`; the two ranges do not
        overlap."""
        ...

    def swap_out(self, cache: int, host: int, nbytes: int) -> None:
        """Copy `nbytes` bytes from byte `cache` of the KV cache to byte `host` of the host's blocks."""
        ...

    def swap_in(self, cache: int, host: int, nbytes: int) -> None:
        """Copy `nbytes` bytes from byte `host` of the host's blocks to byte `cache` of the KV cache."""
        ...

    def send(self, turn: int, num_seqs: int, num_tokens: int) -> None:
        """Give the kernels the arrays of a turn. They read at most `num_seqs` rows of the block tables, and at most
        `num_tokens` rows of the inputs that the program declares."""
        ...

    def expect(self, work: DeviceWork) -> None:
        """Prepare for work that will come very often, so that it runs fast."""
        ...

    def run(self, work: DeviceWork) -> None:
        """Run kernels over the arrays that were sent last."""
        ...

    def fetch(self, turn: int, rows: int, logits: bool) -> None:
        """Copy the step's sampled results for its first `rows` rows, and with `logits` their logits, to the host. This
        ends the turn."""
        ...

    def wait(self, turn: int) -> None:
        """Wait until a turn has ended."""
        ...

    def write(self, at: str, tokens: int, rows: np.ndarray) -> None:
        """Write rows `[count, ...]` to the place `at` (see `SectionArray.at`), after a step of `tokens` tokens: they
        are an input of the section that runs next. The rows that it is asked for replace the step's logit rows."""
        ...

    def write_pool(self, name: str, offset: int, values: np.ndarray, only: int = -1) -> None:
        """Write contiguous `values` of any shape at byte `offset` of a pool, a weight of `Program.adapters`, on rank
        `only` or on all ranks (-1). No step in flight may read that place. Any thread may call this."""
        ...

    def read(self, at: str, tokens: int, nbytes: int) -> np.ndarray:
        """Wait for a section and return a copy of the first bytes, uint8 `[nbytes]`, of its output at `at`."""
        ...

    def close(self) -> None:
        """Free everything. Calling it again does nothing."""
        ...


@runtime_checkable
class Chooser(Protocol):
    """A device that finds the largest logit of each row itself."""

    def largest(self, rows: int) -> list[int]:
        """The token of the largest logit of each of the first `rows` rows (the first of equals), -1 if the largest is
        not finite; for the step that was waited for last."""
        ...


@runtime_checkable
class Grouped(Protocol):
    """A device of several ranks, one process each."""

    @property
    def group(self) -> RankProcesses | None:
        """The processes of ranks 1 and up; None until they are started."""
        ...


@runtime_checkable
class Merger(Protocol):
    """A device whose ranks each find the largest of their own logits, so that no whole row has to be sent.

    most_wanted: the largest `DeviceWork.wanted` for which they do this.
    """

    @property
    def most_wanted(self) -> int:
        """The largest `DeviceWork.wanted` that saves work."""
        ...

"""Device: where an engine's kernels run, as the player sees it."""

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

    sizes: the `SIZES` of the step. phase: of the plan, where there is one. section: of the program, that runs instead
    ("": what the device runs as a step). moves_only: only what makes the step's moves. trees: whether a sequence
    verifies a tree of guesses. wanted: of each logit row only so many of the largest are, of equals the first; any
    other may be minus infinity. 0: all.
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
        """Bytes [offset, offset + nbytes) of the cache, uint8, writable; of several ranks those of each."""
        ...


class Device(Protocol):
    """Kernels and memory of one engine, and a queue of what they are to do: in order, and perhaps later than the call.

    program: what it runs. plan: what the steps launch; None where a device runs a step of any size in one call, which
    makes the moves itself and samples nothing. limits: the largest step. cache: the KV cache. host: what the host keeps
    of preempted requests; no blocks where nothing is swapped. turns: how many steps may be under way. logits: float32
    of the host, `[L, vocab]`, of the step that was waited for last.
    """

    @property
    def program(self) -> Program:
        """The steps that it runs."""
        ...

    @property
    def plan(self) -> LaunchPlan | None:
        """What the steps launch; None where a step of any size is one call."""
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
        """The blocks that the host keeps of preempted requests; none where nothing is swapped."""
        ...

    @property
    def turns(self) -> int:
        """How many steps may be under way."""
        ...

    @property
    def logits(self) -> np.ndarray:
        """Logits on the host, float32 [L, vocab], of the step that was waited for last."""
        ...

    def arrays(self, turn: int) -> Mapping[str, Any]:
        """The host's side of a step, for the largest there can be: `INPUTS` and what the program declares, contiguous
        buffers of any kind, and where there is a plan also `SAMPLING` and `SAMPLED`, of numpy. One of `INPUTS` may be
        missing that the kernels do not read."""
        ...

    def zero(self, offset: int, nbytes: int) -> None:
        """Fill a part of the KV cache with zeros."""
        ...

    def copy(self, source: int, target: int, nbytes: int) -> None:
        """Copy from byte `source` of the KV cache to its byte `target`; the two parts do not overlap."""
        ...

    def swap_out(self, cache: int, host: int, nbytes: int) -> None:
        """Copy from byte `cache` of the KV cache to byte `host` of the host's blocks."""
        ...

    def swap_in(self, cache: int, host: int, nbytes: int) -> None:
        """Copy back."""
        ...

    def send(self, turn: int, num_seqs: int, num_tokens: int) -> None:
        """Give the kernels the arrays of a turn. They read at most `num_seqs` rows of the block tables, and at most
        `num_tokens` rows of the inputs that the program declares."""
        ...

    def expect(self, work: DeviceWork) -> None:
        """This work will come very often: make it quick."""
        ...

    def run(self, work: DeviceWork) -> None:
        """Run kernels over what was sent."""
        ...

    def fetch(self, turn: int, rows: int, logits: bool) -> None:
        """Give the host what the step sampled for its first rows, and its logits or not: this ends a turn."""
        ...

    def wait(self, turn: int) -> None:
        """Until a turn has ended."""
        ...

    def write(self, at: str, tokens: int, rows: np.ndarray) -> None:
        """Put rows `[count, ...]` where `SectionArray.at` says, behind a step of so many tokens: what the section that
        runs next is given. Logit rows of the step are forgotten for those that it is asked for."""
        ...

    def write_pool(self, name: str, offset: int, values: np.ndarray, only: int = -1) -> None:
        """Put contiguous `values` of any shape at byte `offset` of a pool, a weight of `Program.adapters`, which no
        step that is under way may read there: of one rank, or of all (-1). From any thread."""
        ...

    def read(self, at: str, tokens: int, nbytes: int) -> np.ndarray:
        """Wait for what a section gives, and lies there: a copy of the first bytes, uint8 `[nbytes]`."""
        ...

    def close(self) -> None:
        """Free everything. Calling it again does nothing."""
        ...


@runtime_checkable
class Chooser(Protocol):
    """A device that finds the largest logits itself."""

    def largest(self, rows: int) -> list[int]:
        """The token of the largest logit of each of the first rows (the first of equals), -1 where logits are not
        numbers; of the step that was waited for last."""
        ...


@runtime_checkable
class Grouped(Protocol):
    """A device of several ranks, each of them a process."""

    @property
    def group(self) -> RankProcesses | None:
        """The processes of ranks 1 and up; None as long as they are not started."""
        ...


@runtime_checkable
class Merger(Protocol):
    """A device whose ranks each find the largest of their own logits, so that no whole row has to travel.

    most_wanted: the largest `DeviceWork.wanted` for which they do.
    """

    @property
    def most_wanted(self) -> int:
        """The largest `DeviceWork.wanted` that makes a difference."""
        ...

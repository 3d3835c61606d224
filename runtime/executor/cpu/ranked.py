"""The devices of an engine that several ranks run together: processes of this machine, each with its own weights."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import RLock
from typing import TYPE_CHECKING

from ...address import address_of
from ...errors import DeviceError, IccError
from ...format.batch import BatchLimits
from ...format.footprint import KV_SHARES, LOGITS_BYTES, batch_limits
from ...format.load import Engine
from ...format.manifest import rank_program
from ..device import DeviceWork
from .cores import usable_cores
from .device import CpuDevice, arrays_of
from .library import IccBatch, KernelLibrary
from .memory import AnonymousMemory, available_bytes
from .rank_group import CpuRankHello, RankGroup, cores_by_rank
from .rank_memory import RankCaches, RankMemory

if TYPE_CHECKING:
    import numpy as np
else:
    from ...late import np


MOST_TURNS = 8  # of RankRing in codegen_templates/cpp/stages.h


class RankedDevice(CpuDevice):
    """Rank 0, which gets the batches and samples; its library tells the other ranks what to do. DeviceError if one of
    them has ended: the engine must then be loaded again.

    A pipeline whose ranks have their own cores may have as many steps in flight as stages: `run` returns when rank 0
    has done its part of a step, while the others continue.

    threads, cores, kv_bytes: for all ranks together, divided equally; see CpuDevice. shares_cache: put the KV caches of
    all ranks in memory that this process can read and write, perhaps without huge pages; ignored for pipeline stages.
    """

    def __init__(
        self,
        engine: Engine,
        threads: int | None = None,
        kv_bytes: int | None = None,
        section: str = "",
        cores: frozenset[int] | None = None,
        more_blocks: Sequence[int] = (),
        shares_cache: bool = False,
    ) -> None:
        count = engine.manifest.ranks
        places = cores_by_rank(count, cores)
        own_cores = places[0] is not None
        if not own_cores and cores is not None:  # ranks without their own cores share all
            places = [sorted(cores)] * count
        own = None if places[0] is None else frozenset(places[0])
        each = max((usable_cores(own) if own_cores else 1) if threads is None else threads // count, 1)
        memory = int(available_bytes() * KV_SHARES["cpu"]) if kv_bytes is None else kv_bytes
        limits = batch_limits(engine.program, engine.manifest.limits, LOGITS_BYTES["cpu"])
        main = engine.manifest.main
        parts = main.parts if main.is_stage else count
        self._shares_cache = shares_cache and not main.is_stage
        self.turns = _turns(engine) if own_cores else 1
        self._shared = RankMemory(
            count, arrays_of(engine.program), limits, logits_bytes=_logits_bytes(engine, limits), turns=self.turns
        )
        try:  # a stage touches only the caches of its own layers, so that all stages together hold each cache once
            super().__init__(
                engine, each, memory // parts, section, own, more_blocks=more_blocks,
                arrays=self._shared.turns[0].arrays, logits=self._shared.turns[0].logits,
            )  # fmt: skip
        except BaseException:
            self._shared.close()
            raise
        assert self._handle is not None and engine.library is not None
        self._sides, self._turn = self._turn_views(self._shared.turns), 0
        self._library.join_ranks(self._handle, 0, count, each, self._shared)
        self.group: RankGroup | None = None
        self._process = os.getpid()
        self._lock = RLock()  # orders to ranks are sent one at a time, from any thread
        hellos = [
            CpuRankHello(
                path=str(engine.path.resolve()), digest=engine.manifest.digest, program=rank_program(rank), rank=rank,
                count=count, isa=engine.library.isa, verify=engine.files.verifies, threads=each, cores=places[rank],
                num_blocks=list(self.cache.num_blocks), section=section, turns=self.turns,
                shares_cache=self._shares_cache,
            )
            for rank in range(1, count)
        ]  # fmt: skip
        try:
            self.group = RankGroup(self._shared, hellos, count // parts if parts > 1 else 1)
        except BaseException:
            self.close()
            raise

    most_wanted = 128
    kv_views = None  # type: ignore[assignment]  # each rank has a part of the cache, out of reach unless it is shared

    def _cache_memory(self) -> AnonymousMemory | RankCaches:
        if not self._shares_cache:
            return super()._cache_memory()
        found = self._shared.caches(0, self.cache.nbytes)
        self.kv_views = found.views
        return found

    def zero(self, offset: int, nbytes: int) -> None:
        """Fill bytes [offset, offset + nbytes) of the KV caches of all ranks with zeros."""
        with self._telling() as handle:
            self._library.zero_on_ranks(handle, offset, nbytes)

    def copy(self, source: int, target: int, nbytes: int) -> None:
        """Copy `nbytes` bytes from byte `source` of the KV caches of all ranks to their byte `target`."""
        with self._telling() as handle:
            self._library.copy_on_ranks(handle, source, target, nbytes)

    def arrays(self, turn: int) -> Mapping[str, memoryview]:
        """As CpuDevice, but each turn has its own arrays."""
        return self._shared.turns[turn].arrays

    def send(self, turn: int, num_seqs: int, num_tokens: int) -> None:
        """Select this turn's arrays, which all ranks read in place."""
        if self.turns == 1:
            return
        self._turn = turn
        self._arrays, self._batches = self._shared.turns[turn].arrays, self._sides[turn]
        self._parents, self._logit_rows = (address_of(self._arrays[name]) for name in ("parents", "logit_rows"))

    def wait(self, turn: int) -> None:
        """Wait until all ranks have done the step of this turn; `logits` are then those of this step."""
        if self.turns > 1:
            with self._telling() as handle:
                self._library.end(handle, turn)
            logits = self._shared.turns[turn].logits
            assert logits is not None
            self._logits = logits

    def _call(self, section: int | None, behind: bool) -> None:
        if self.turns == 1:
            super()._call(section, behind)
            return
        with self._telling() as handle:
            self._library.begin(handle, -1 if section is None else section, self._turn, self._batches)
        if behind:
            self.wait(self._turn)

    def run(self, work: DeviceWork) -> None:
        """Call the library once, on all ranks."""
        with self._telling() as handle:
            self._library.want_of_ranks(handle, work.wanted if work.wanted <= self.most_wanted else 0)
            super().run(work)

    def write(self, at: str, tokens: int, rows: np.ndarray) -> None:
        """As CpuDevice, on all ranks: rows that are asked for go to memory that all ranks read."""
        if at in self._offsets:
            super().write(at, tokens, rows)
            self._write(-1, self._offsets[at] * tokens, rows)
        else:
            self._shared.asked[: len(rows)] = rows.data
            self._asked = address_of(self._shared.asked)

    def write_pool(self, name: str, offset: int, values: np.ndarray, only: int = -1) -> None:
        """As CpuDevice, on rank `only` or on all (-1). Waits for the steps in flight."""
        if only < 1:
            super().write_pool(name, offset, values)
        if only != 0:
            self._write(list(self.program.weights).index(name), offset, values, max(only, 0))

    @property
    def given_bytes(self) -> int:
        """How many bytes rank 0 has sent to the others so far; each of the others has sent as many."""
        assert self._handle is not None
        return self._library.given_to_ranks(self._handle)

    def _write(self, weight: int, offset: int, values: np.ndarray, only: int = 0) -> None:
        """Copy values to byte `offset` of a weight, or of the arena (-1), on rank `only`, or on all other ranks (0)."""
        raw, most = values.reshape(-1).view(np.uint8).data, self._shared.stage_bytes
        for first in range(0, len(raw), most):
            piece = raw[first : first + most]
            with self._telling() as handle:
                for turn in range(self.turns if self.turns > 1 else 0):  # steps in flight may use the slots
                    self._library.end(handle, turn)
                self._shared.stage(piece)
                self._library.write_on_ranks(handle, weight, offset + first, len(piece), only)

    @contextmanager
    def _telling(self) -> Iterator[int]:
        """A context that gives the handle while orders are sent to the other ranks. DeviceError if a rank is gone."""
        if os.getpid() != self._process:
            raise DeviceError("the engine's ranks belong to the process that loaded it", "load it in this one, too")
        with self._lock:
            assert self._handle is not None
            try:
                yield self._handle
            except IccError as error:
                raise self._failed(error) from error

    def _failed(self, error: IccError) -> IccError:
        lost = self.group.lost if self.group is not None else ""
        return DeviceError(f"{lost}: its part of the model is gone", "load the engine again") if lost else error

    def close(self) -> None:
        """End the other ranks, then as CpuDevice. Does nothing in a fork of the process that started them."""
        if self._handle is None or os.getpid() != self._process:
            return
        if self.group is not None and not self.group.lost:
            with self.group.ending():
                self._library.end_ranks(self._handle)
        if self.group is not None:
            self.group.close()
        super().close()
        self._shared.close()


class FollowingDevice(CpuDevice):
    """Rank 1 or a later one: it runs what rank 0 posts, over the same arrays of a step. descriptor: the shared memory's
    file descriptor."""

    def __init__(self, engine: Engine, hello: CpuRankHello, descriptor: int) -> None:
        limits = batch_limits(engine.program, engine.manifest.limits, LOGITS_BYTES["cpu"])
        nbytes = _logits_bytes(engine, limits)
        self._shared = RankMemory(hello.count, arrays_of(engine.program), limits, descriptor, nbytes, hello.turns)
        self._shares_as = hello.rank if hello.shares_cache else None
        cores = None if hello.cores is None else frozenset(hello.cores)
        super().__init__(
            engine, hello.threads, section=hello.section, cores=cores, num_blocks=hello.num_blocks,
            arrays=self._shared.turns[0].arrays, logits=self._shared.turns[0].logits,
        )  # fmt: skip
        assert self._handle is not None
        self._sides = self._turn_views(self._shared.turns)
        self._library.join_ranks(self._handle, hello.rank, hello.count, hello.threads, self._shared)

    def _cache_memory(self) -> AnonymousMemory | RankCaches:
        if self._shares_as is None:
            return super()._cache_memory()
        return self._shared.caches(self._shares_as, self.cache.nbytes)

    def follow(self) -> int:
        """Run what rank 0 posts, until rank 0 ends (result 0) or a rank is gone (2)."""
        assert self._handle is not None
        if self._cores is not None:
            self._cores.enter()
        every = (IccBatch * (len(self._batches) * len(self._sides)))(*(batch for side in self._sides for batch in side))
        return self._library.follow(self._handle, every, len(self._sides))


def _turns(engine: Engine) -> int:
    """How many steps may be in flight: the number of stages if each has one rank; 1 for other divisions, and for
    libraries that end each step before the next."""
    main, library = engine.manifest.main, engine.library
    if not main.is_stage or main.parts > 1 or library is None:
        return 1
    turns = min(engine.manifest.ranks, MOST_TURNS)
    return turns if KernelLibrary(engine.files.read(library.path), library.path).has_turns else 1


def _logits_bytes(engine: Engine, limits: BatchLimits) -> int:
    """The size in bytes of logits that the last stage writes and rank 0 reads; 0 if each rank has its own logits."""
    return limits.logit_rows * engine.program.vocab_size * 4 if engine.manifest.main.is_stage else 0

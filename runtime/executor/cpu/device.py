"""CpuDevice: runs a whole step on this machine's cores in one call of the engine's generated library."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from ctypes import Array
from math import isfinite
from typing import TYPE_CHECKING

from ...address import address_of
from ...batch.packed import plain_arrays, zeroed
from ...errors import CapacityError, UsageError
from ...format.batch import CPU_INPUTS, BatchArray
from ...format.footprint import LOGITS_BYTES, batch_limits
from ...format.kv import KVGroup, KVMemory
from ...format.load import Engine
from ...format.program import DRAFTS, Program
from ..device import DeviceWork
from .cores import KernelCores, preferred_cores, usable_cores
from .library import IccBatch, KernelLibrary
from .memory import AnonymousMemory, choose_blocks

if TYPE_CHECKING:
    import numpy as np

    from .rank_memory import RankCaches, StepArrays
else:
    from ...late import np

_MAX_THREADS = 1024


def arrays_of(program: Program) -> list[BatchArray]:
    """The input arrays of a step of a program."""
    return [*CPU_INPUTS, *program.inputs]


class CpuDevice:
    """One library handle with its arena, KV cache and logits buffer, all allocated once. A call is synchronous and
    without the GIL, on host memory: there is nothing to send, to fetch or to wait for.

    threads: how many run kernels, the calling one included; None: as many as physical cores that the process may use,
    without the slower ones of a hybrid CPU. kv_bytes: memory for the KV cache; None: enough for a full batch, within a
    share of the machine's memory. section: run this section as a step, instead of the whole program. cores: the cores
    to which kernel threads and threads that call `run` are pinned until `close`; None: see `preferred_cores`.
    num_blocks: of each KV group; None: see `choose_blocks`, which gets `more_blocks`. arrays: memory for the arrays of
    a step (`arrays_of` the program); logits: memory for the logits; None: both are allocated here.
    """

    plan, turns = None, 1

    def __init__(
        self,
        engine: Engine,
        threads: int | None = None,
        kv_bytes: int | None = None,
        section: str = "",
        cores: frozenset[int] | None = None,
        num_blocks: Sequence[int] | None = None,
        arrays: Mapping[str, memoryview] | None = None,
        logits: memoryview | None = None,
        more_blocks: Sequence[int] = (),
    ) -> None:
        if threads is not None and not 1 <= threads <= _MAX_THREADS:
            raise UsageError(f"threads = {threads}: must be from 1 to {_MAX_THREADS}")
        if cores is None:
            cores = preferred_cores(threads)
        self._cores = None if cores is None else KernelCores(cores)
        program = self.program = engine.program
        self.limits = batch_limits(program, engine.manifest.limits, LOGITS_BYTES["cpu"])
        self.cache = (
            choose_blocks(program.kv, engine.manifest.limits, kv_bytes, more_blocks)
            if num_blocks is None
            else KVMemory(program.kv, tuple(num_blocks))
        )
        self.host = KVMemory(program.kv, tuple(0 for _ in program.kv.groups))
        if any(count * group.block_size > 2**31 - 1 for group, count in self._counts()):
            raise CapacityError(
                "the KV cache has more slots than an int32 can number",
                "give it less memory (--kv-mib, or kv_bytes in Python)",
            )

        assert engine.library is not None
        self._library = KernelLibrary(engine.files.read(engine.library.path), engine.library.path)
        self._arena = AnonymousMemory(program.arena_bytes_per_token * self.limits.tokens)
        self._kv = self._cache_memory()
        self._logits = zeroed(self.limits.logit_rows * program.vocab_size * 4) if logits is None else logits
        self._arrays = plain_arrays(arrays_of(program), self.limits) if arrays is None else arrays
        old = [array.row_bytes for s in program.sections for array in s.outputs.values() if array.at == DRAFTS]
        self._drafts = zeroed(self.limits.logit_rows * sum(old)) if old else None  # for engines of format 2
        self._batches = self._views(self._arrays, self._logits)
        self._parents, self._logit_rows = self._batches[0].parents, self._batches[0].logit_rows
        self._section, self._asked = section, self._logit_rows
        self._offsets = {buffer.name: buffer.offset for buffer in program.buffers}
        self._weights = engine.weights  # keeps them mapped as long as kernels may read them
        rooms = program.adapters.pools if program.adapters else ()
        self._pools = {pool.weight: AnonymousMemory(program.weights[pool.weight].nbytes) for pool in rooms}
        pools = {name: memory.address for name, memory in self._pools.items()}
        with nullcontext() if self._cores is None else self._cores.starting():
            self._handle: int | None = self._library.create(
                threads or usable_cores(cores),
                self._weights.addresses(program, pools, engine.manifest.main.is_stage),
                self._arena.address,
                self._kv.address,
                self.cache.num_blocks,
            )
        self._bind_inputs([self._arrays])

    def _cache_memory(self) -> AnonymousMemory | RankCaches:
        """Allocate the KV cache."""
        return AnonymousMemory(self.cache.nbytes)

    def _bind_inputs(self, turns: Sequence[Mapping[str, memoryview]]) -> None:
        if self.program.inputs:
            assert self._handle is not None
            own = [address_of(arrays[array.name]) for arrays in turns for array in self.program.inputs]
            self._library.bind_inputs(self._handle, own)

    def _turn_views(self, turns: Sequence[StepArrays]) -> list[Array[IccBatch]]:
        """`_views` of each step that may be in flight; binds the inputs that the program declares for all of them."""
        self._bind_inputs([turn.arrays for turn in turns])
        return [self._views(turn.arrays, self._logits if turn.logits is None else turn.logits) for turn in turns]

    def _counts(self) -> Iterable[tuple[KVGroup, int]]:
        return zip(self.cache.layout.groups, self.cache.num_blocks, strict=True)

    def _views(self, arrays: Mapping[str, memoryview], logits: memoryview) -> Array[IccBatch]:
        """The struct of a step for each KV group: it points to the group's part of the arrays that are split by
        group."""
        views = (IccBatch * self.limits.groups)()
        for group, view in enumerate(views):
            view.max_blocks, view.logits = self.limits.table_stride, address_of(logits)
            view.drafts = None if self._drafts is None else address_of(self._drafts)
            for array in CPU_INPUTS:
                part = group * self.limits.group_bytes(array)
                setattr(view, array.name, address_of(arrays[array.name]) + part)
        return views

    @property
    def logits(self) -> np.ndarray:
        """A view, float32 [logit_rows, vocab], of which the last step has written the first rows."""
        return np.frombuffer(self._logits, np.float32).reshape(-1, self.program.vocab_size)

    def arrays(self, turn: int) -> Mapping[str, memoryview]:
        """The arrays that a step reads, flat, by name; the same for each turn."""
        return self._arrays

    def zero(self, offset: int, nbytes: int) -> None:
        """Fill bytes [offset, offset + nbytes) of the KV cache with zeros."""
        ctypes.memset(self._kv.address + offset, 0, nbytes)

    def copy(self, source: int, target: int, nbytes: int) -> None:
        """Copy `nbytes` bytes from byte `source` of the KV cache to its byte `target`."""
        ctypes.memmove(self._kv.address + target, self._kv.address + source, nbytes)

    def kv_views(self, offset: int, nbytes: int) -> list[memoryview]:
        """Bytes [offset, offset + nbytes) of the KV cache, writable; valid until `close`."""
        return [memoryview((ctypes.c_char * nbytes).from_address(self._kv.address + offset)).cast("B")]

    def swap_out(self, cache: int, host: int, nbytes: int) -> None:
        """Never called: NotImplementedError."""
        raise NotImplementedError("the KV cache is host memory already")

    swap_in = swap_out

    def send(self, turn: int, num_seqs: int, num_tokens: int) -> None:
        """Does nothing: kernels read the host's arrays."""

    def expect(self, work: DeviceWork) -> None:
        """Does nothing: steps of all sizes run the same way."""

    def run(self, work: DeviceWork) -> None:
        """Call the library once, for a step or for a section after it. The library does moves at the start of each
        step: moves alone are done by a step that writes nothing to the cache."""
        if work.moves_only:
            slots = self._arrays["slot_mapping"].cast("B")
            kept, slots[:] = bytes(slots), b"\xff" * len(slots)
            self.run(work._replace(moves_only=False, trees=False))
            slots[:] = kept
            return
        assert self._handle is not None
        if self._cores is not None:
            self._cores.enter()
        sizes, section = work.sizes, self.program.section(work.section or self._section)
        behind = section is not None and not self.program.sections[section].is_step
        for batch in self._batches:
            batch.num_logit_rows = sizes["num_logit_rows"]
            if behind:
                batch.logit_rows = self._asked
                continue
            batch.num_tokens, batch.num_seqs = sizes["num_tokens"], sizes["num_seqs"]
            batch.num_moves, batch.greedy = sizes["num_moves"], work.wanted == 1
            batch.parents = self._parents if work.trees else None
            batch.logit_rows = self._logit_rows
        self._call(section, behind)

    def _call(self, section: int | None, behind: bool) -> None:
        """Run the library's step, or one of its sections. behind: whether the section runs on rows of the previous
        step."""
        assert self._handle is not None
        if section is None:
            self._library.step(self._handle, self._batches)
        else:
            self._library.section(self._handle, section, self._batches)

    def fetch(self, turn: int, rows: int, logits: bool) -> None:
        """Does nothing: the logits are in host memory."""

    def wait(self, turn: int) -> None:
        """Does nothing: `run` has waited."""

    def largest(self, rows: int) -> list[int]:
        """The token of the largest logit of each of the last step's first `rows` rows; -1 if the largest is not
        finite."""
        found = self._library.largest(address_of(self._logits), rows, self.program.vocab_size)
        if found is not None:
            return found
        tokens = self.logits[:rows].argmax(axis=1).tolist()
        return [token if isfinite(row[token]) else -1 for row, token in zip(self.logits, tokens, strict=False)]

    def write(self, at: str, tokens: int, rows: np.ndarray) -> None:
        """Copy `rows` `[count, ...]` into the buffer `at`, after a step of `tokens` tokens; if `at` is no buffer, they
        are the asked logit rows, which are read in place."""
        if at in self._offsets:
            ctypes.memmove(self._arena.address + self._offsets[at] * tokens, rows.ctypes.data, rows.nbytes)
        else:
            self._rows = rows  # in place of the step's logit rows
            self._asked = rows.ctypes.data

    def write_pool(self, name: str, offset: int, values: np.ndarray, only: int = -1) -> None:
        """As `Device.write_pool`, synchronously: pools are host memory."""
        ctypes.memmove(self._pools[name].address + offset, values.ctypes.data, values.nbytes)

    def read(self, at: str, tokens: int, nbytes: int) -> np.ndarray:
        """A copy of the first bytes, uint8 `[nbytes]`, of the buffer `at` after a step of `tokens` tokens, or of the
        drafts if `at` is no buffer."""
        if at in self._offsets:
            found = self._arena.address + self._offsets[at] * tokens
        else:
            assert self._drafts is not None, at
            found = address_of(self._drafts)
        return np.frombuffer(ctypes.string_at(found, nbytes), np.uint8)

    def close(self) -> None:
        """Stop the threads and free the memory."""
        if self._handle is None:
            return
        handle, self._handle = self._handle, None
        self._library.destroy(handle)
        if self._cores is not None:
            self._cores.leave()
        for memory in (self._arena, self._kv, *self._pools.values()):
            memory.close()

"""InterpretDevice runs a GPU engine's steps on the CPU: the same plan and the same rendered sources, interpreted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from ...runtime.batch.packed import host_arrays
from ...runtime.executor.device import DeviceWork
from ...runtime.executor.walk import BoundLaunch, LaunchPointer, Walker
from ...runtime.format.batch import BLOCK_TABLES, GPU_INPUTS, SAMPLED
from ...runtime.format.footprint import batch_limits
from ...runtime.format.kv import KVLayout, KVMemory
from ...runtime.format.manifest import Limits
from ...runtime.format.program import Program
from ..backends.triton.interpreter import TORCH_TYPES, launch
from ..backends.triton.spec import LaunchSpec

if TYPE_CHECKING:
    from .interpret_ranks import Meeting

_LOGITS_BYTES = 1 << 40  # enough for the logits of every token of a step
_MULTIPROCESSORS = 1 << 30  # programs that wait for each other are run as one launch


class InterpretDevice:
    """A device that runs all work synchronously, thousands of times slower than a GPU. For tests.

    specs: every object's source by name. packed: the bytes of each weight. Memory that no kernel has written is NaN, to
    reveal wrong reads. Kernels read copies made by `send`, not the host's arrays.
    """

    turns = 2

    def __init__(
        self,
        program: Program,
        specs: Mapping[str, LaunchSpec],
        packed: Mapping[str, np.ndarray],
        limits: Limits,
        num_blocks: int | tuple[int, ...],
        section: str = "",
        host_blocks: int | tuple[int, ...] = 0,
    ) -> None:
        assert program.plan is not None
        self.program, self.plan, self._section = program, program.plan, section
        self.limits = batch_limits(program, limits, _LOGITS_BYTES)
        self.cache, self.host = _memory(program.kv, num_blocks), _memory(program.kv, host_blocks)
        self._walker, self._specs = Walker(program, self.plan, self.cache, self.limits, _MULTIPROCESSORS), specs
        self._weights = {name: _memory_of(data) for name, data in packed.items()}
        listed = (*GPU_INPUTS, *program.inputs, *SAMPLED)
        self._sides = [host_arrays(listed, self.limits) for _ in range(self.turns)]
        self._there = host_arrays(listed, self.limits)
        self._there["token"][:] = -9
        rows = self.limits.logit_rows
        self.logits = np.zeros((rows, program.vocab_size), np.float32)
        self._host = _poisoned(self.host.nbytes)
        self.join(0, ())
        self._spaces = {
            "arena": _poisoned(program.arena_bytes_per_token * self.limits.tokens),
            "kv": _poisoned(self.cache.nbytes),
            "scratch": _poisoned(self.plan.scratch_bytes),
            "counters": torch.zeros(4 * self.plan.counters(self.limits.seqs), dtype=torch.uint8),
            "logits": _poisoned(self.logits.nbytes),
        }
        self._spaces |= {array.plan_name: _memory_of(self._there[array.name]) for array in listed}

    def join(self, rank: int, areas: Sequence[torch.Tensor], meeting: Meeting | None = None) -> None:
        """Run as one of several ranks. areas: the exchange areas of all ranks, uint8 [n]. meeting: their communicator;
        None if they need none."""
        self._rank, self._areas, self._meeting = rank, areas, meeting

    def arrays(self, turn: int) -> Mapping[str, np.ndarray]:
        """The host's arrays of a turn, by name."""
        return self._sides[turn]

    def zero(self, offset: int, nbytes: int) -> None:
        """Fill bytes [offset, offset + nbytes) of the KV cache with zeros."""
        self._spaces["kv"][offset : offset + nbytes] = 0

    def copy(self, source: int, target: int, nbytes: int) -> None:
        """Copy `nbytes` bytes from byte `source` of the KV cache to its byte `target`."""
        kv = self._spaces["kv"]
        kv[target : target + nbytes] = kv[source : source + nbytes].clone()

    def swap_out(self, cache: int, host: int, nbytes: int) -> None:
        """Copy `nbytes` bytes from byte `cache` of the KV cache to byte `host` of the host's blocks."""
        self._host[host : host + nbytes] = self._spaces["kv"][cache : cache + nbytes]

    def swap_in(self, cache: int, host: int, nbytes: int) -> None:
        """Copy `nbytes` bytes from byte `host` of the host's blocks to byte `cache` of the KV cache."""
        self._spaces["kv"][cache : cache + nbytes] = self._host[host : host + nbytes]

    def send(self, turn: int, num_seqs: int, num_tokens: int) -> None:
        """Copy a turn's arrays to the kernels; of block tables and declared inputs, only the rows that are read."""
        counts = {BLOCK_TABLES.name: num_seqs, **{array.name: num_tokens for array in self.program.inputs}}
        for array in (*GPU_INPUTS, *self.program.inputs):
            rows = slice(counts.get(array.name))
            self._there[array.name][rows] = self._sides[turn][array.name][rows]

    def expect(self, work: DeviceWork) -> None:
        """Ignored."""

    def run(self, work: DeviceWork) -> None:
        """Run the work, one launch after the other."""
        assert work.phase is not None
        sizes = work.phase.rank_sizes(work.sizes, self._rank)
        for bound in self._walker.walk(work.phase, sizes, work.section or self._section):
            if bound.launch.makes_moves or not work.moves_only:
                self._launch(bound)

    def fetch(self, turn: int, rows: int, logits: bool) -> None:
        """Copy the first rows of a turn's sampling results to the host and, if `logits`, their logits."""
        for array in SAMPLED:
            self._sides[turn][array.name][:rows] = self._there[array.name][:rows]
        if logits:
            found = self._spaces["logits"].view(torch.float32).numpy()
            self.logits[:rows] = found[: rows * self.program.vocab_size].reshape(rows, self.program.vocab_size)

    def wait(self, turn: int) -> None:
        """Nothing to wait for: `run` is synchronous."""

    def write(self, at: str, tokens: int, rows: np.ndarray) -> None:
        """Copy the bytes of `rows`, of any shape, to the buffer `at`, or to the logit rows, after a step of `tokens`
        tokens."""
        content = _memory_of(rows)
        self._memory_at(at, tokens)[: len(content)] = content

    def write_pool(self, name: str, offset: int, values: np.ndarray, only: int = -1) -> None:
        """Copy the bytes of `values`, of any shape, to byte `offset` of a pool of adapters."""
        content = _memory_of(values)
        self._weights[name][offset : offset + len(content)] = content

    def read(self, at: str, tokens: int, nbytes: int) -> np.ndarray:
        """A copy of the first bytes, uint8 [nbytes], of the result that a section left at `at`."""
        return self._memory_at(at, tokens)[:nbytes].numpy().copy()

    def _memory_at(self, at: str, tokens: int) -> torch.Tensor:
        """The memory, uint8 [..], from the input or result `at` of a section on, after a step of `tokens` tokens."""
        offset = next((buffer.offset for buffer in self.program.buffers if buffer.name == at), None)
        return self._spaces[at] if offset is None else self._spaces["arena"][offset * tokens :]

    def close(self) -> None:
        """Nothing to free."""

    def _launch(self, bound: BoundLaunch) -> None:
        exchange = bound.launch.exchange
        if exchange is not None and (self._meeting is not None or exchange.only):
            assert self._meeting is not None, "there is no communicator"
            source, target = (self._resolve(place, "*fp32") for place in bound.args[:2])
            assert isinstance(source, torch.Tensor) and isinstance(target, torch.Tensor)
            for one in bound.exchanged:
                self._meeting.exchange(one.op, self._rank, source[one.source :], target[one.target :], one.count)
            return
        spec = self._specs[bound.launch.object]
        types = self.plan.objects[bound.launch.object].types
        for arg, place in zip(spec.args, bound.args, strict=True):
            offset = place if isinstance(place, int) else place.offset
            assert offset % 16 == 0 or not arg.aligned, f"{spec.entry}: {arg.name} is compiled as a multiple of 16"
        launch(spec, bound.grid, [self._resolve(a, t) for a, t in zip(bound.args, types, strict=True)])

    def _resolve(self, value: LaunchPointer | int, kind: str) -> torch.Tensor | int:
        if isinstance(value, int):
            return value
        memory = self._memory_in(value)
        dtype = TORCH_TYPES[kind.removeprefix("*")]
        rest = memory[value.offset :]
        return rest[: len(rest) // dtype.itemsize * dtype.itemsize].view(dtype)

    def _memory_in(self, place: LaunchPointer) -> torch.Tensor:
        """The memory that a pointer points into, uint8 [n]."""
        match place.space:
            case "weight":
                return self._weights[place.name]
            case "area":
                return self._areas[self._rank if int(place.name) < 0 else int(place.name)]
        return self._spaces[place.space]


def _memory(layout: KVLayout, num_blocks: int | tuple[int, ...]) -> KVMemory:
    """The layout of a cache with `num_blocks` blocks in each group; a single number holds for every group."""
    return KVMemory(layout, num_blocks if isinstance(num_blocks, tuple) else (num_blocks,) * len(layout.groups))


def _poisoned(nbytes: int) -> torch.Tensor:
    """Memory, uint8 [nbytes or more], in which every float is NaN."""
    return torch.full((max(nbytes, 64),), 255, dtype=torch.uint8)


def _memory_of(array: np.ndarray) -> torch.Tensor:
    """The bytes of an array of any shape, uint8 [n], sharing its memory."""
    return torch.from_numpy(array.reshape(-1).view(np.uint8))

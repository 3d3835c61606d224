"""RanksInterpreted runs a GPU engine of several ranks on the CPU, with their kernels in lockstep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import torch

from ...runtime.executor.device import DeviceWork
from ...runtime.format.exchange import EXCHANGE
from ...runtime.format.manifest import Limits
from ...runtime.format.program import Program
from ..backends.triton.lockstep import Choose, Lockstep, next_one
from ..backends.triton.spec import LaunchSpec
from .interpret import InterpretDevice


class RanksInterpreted(InterpretDevice):
    """Rank 0, which forwards every call to the other ranks. packed: the weights of each rank. exchanges: whether there
    is a communicator; otherwise ranks exchange data through memory. choose: see Lockstep."""

    def __init__(
        self,
        program: Program,
        specs: Mapping[str, LaunchSpec],
        packed: Sequence[Mapping[str, np.ndarray]],
        limits: Limits,
        num_blocks: int | tuple[int, ...],
        exchanges: bool = False,
        choose: Choose = next_one,
    ) -> None:
        self._lockstep = Lockstep(choose)
        areas = [torch.zeros(EXCHANGE.nbytes, dtype=torch.uint8) for _ in packed]
        meeting = Meeting(self._lockstep, len(packed)) if exchanges else None
        super().__init__(program, specs, packed[0], limits, num_blocks)
        self.join(0, areas, meeting)
        self._others = [InterpretDevice(program, specs, own, limits, num_blocks) for own in packed[1:]]
        for rank, other in enumerate(self._others, 1):
            other.join(rank, areas, meeting)

    def zero(self, offset: int, nbytes: int) -> None:
        """In the KV caches of all ranks."""
        super().zero(offset, nbytes)
        for other in self._others:
            other.zero(offset, nbytes)

    def copy(self, source: int, target: int, nbytes: int) -> None:
        """In the KV caches of all ranks."""
        super().copy(source, target, nbytes)
        for other in self._others:
            other.copy(source, target, nbytes)

    def send(self, turn: int, num_seqs: int, num_tokens: int) -> None:
        """Copy a turn's arrays to all ranks."""
        super().send(turn, num_seqs, num_tokens)
        for other in self._others:
            for name, array in self.arrays(turn).items():
                other.arrays(turn)[name][:] = array
            other.send(turn, num_seqs, num_tokens)

    def write_pool(self, name: str, offset: int, values: np.ndarray, only: int = -1) -> None:
        """As `InterpretDevice.write_pool`, on one rank, or on all (-1)."""
        for rank, device in enumerate((super(), *self._others)):
            if only in (-1, rank):
                device.write_pool(name, offset, values)

    def run(self, work: DeviceWork) -> None:
        """Run the work on all ranks."""
        self._lockstep.run([partial(super().run, work), *(partial(other.run, work) for other in self._others)])

    def all_logits(self, rows: int) -> list[np.ndarray]:
        """The logits of the first rows on each rank, float32 [rows, vocabulary]. They must be equal, because each rank
        samples from its own."""
        every = [self, *self._others]
        for device in every:
            InterpretDevice.fetch(device, 0, rows, True)
        return [device.logits[:rows].copy() for device in every]


class Meeting:
    """A communicator of ranks that run in lockstep. aborted: ranks no longer wait for each other."""

    def __init__(self, lockstep: Lockstep, ranks: int) -> None:
        self._lockstep, self._ranks = lockstep, ranks
        self._given: list[dict[int, torch.Tensor]] = [{}]
        self._turns = [0] * ranks
        self.aborted = False

    def exchange(self, op: str, rank: int, source: torch.Tensor, target: torch.Tensor, count: int) -> None:
        """Exchange `count` float32 per rank: from `source` [n] of this rank, the result of all ranks, in order, to
        `target` [n]. op: see `Exchanged`."""
        turn = self._turns[rank]
        self._turns[rank] += 1
        while len(self._given) <= turn:
            self._given.append({})
        given = self._given[turn]
        given[rank] = source[: count * (self._ranks if op == "reduce_scatter" else 1)].clone()
        while len(given) < self._ranks and not self.aborted:
            self._lockstep.give_way(rank)
        if self.aborted:
            return
        found = self._found(op, rank, [given[other] for other in range(self._ranks)])
        target[: len(found)] = found

    def _found(self, op: str, rank: int, every: list[torch.Tensor]) -> torch.Tensor:
        """The result of an exchange, [n], on a rank; empty after a reduce on all ranks but the last."""
        match op:
            case "all_gather":
                return torch.cat(every)
            case "broadcast":
                return every[-1]
            case "reduce" if rank < self._ranks - 1:
                return every[0][:0]
        total = every[0].clone()
        for own in every[1:]:
            total += own
        return total.chunk(self._ranks)[rank] if op == "reduce_scatter" else total

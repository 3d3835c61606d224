"""The devices of an engine that several GPUs run together: one process per GPU, each with its part of the weights."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from threading import Lock
from typing import ClassVar

import msgspec
import numpy as np

from ...errors import DeviceError
from ...format.batch import GPU_INPUTS
from ...format.load import Engine
from ...format.manifest import rank_program
from ...format.plan import LaunchPlan
from ..device import DeviceWork
from ..rank_processes import RankHello, RankProcesses, RankReady
from .device import CudaDevice
from .driver import Cuda
from .memory import nbytes_of
from .nccl import Nccl, find_nccl, join
from .peers import Peers
from .rank_orders import Copy, Fetch, Meet, Order, RunStep, Send, SharedTurns, Swap, Write, WritePool, Zero
from .watchdog import Watchdog

_MOST = 1 << 20  # bytes of a message
_PIECE = _MOST // 2  # bytes of a pool in a message, which may contain other orders too


class GpuRankHello(RankHello, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """See RankHello. device: the number of the rank's GPU. host_blocks: how many blocks of each KV group are in host
    memory."""

    device: int
    host_blocks: list[int]


class GpuRanks(RankProcesses):
    """The processes of ranks 1 and up, each of which has a GPU. module: the Python module that they run."""

    module: ClassVar[str] = f"{__package__}.rank_main"

    def __init__(self, hellos: Sequence[GpuRankHello], descriptor: int, device: RankedCudaDevice) -> None:
        super().__init__(self.module, hellos, descriptor, device.release)

    @property
    def handles(self) -> list[bytes]:
        """The handles of their areas, see `Peers.handle`."""
        return [answer.memory for answer in self.answers]

    def begin(self, patience: float) -> None:
        """Wait until all ranks have met. patience: how many seconds a rank may take to receive a message from then
        on."""
        self.expect_ready()
        for connection in self.connections:
            connection.settimeout(patience)

    def post(self, message: bytes) -> None:
        """Send a message to all ranks; a rank that does not receive it counts as lost."""
        for rank, connection in enumerate(self.connections, 1):
            try:
                connection.send(message)
            except OSError as error:
                return self.lose_unreachable(rank, error)


class RankedCudaDevice(CudaDevice):
    """Rank 0, which schedules and forwards every call to the other ranks. DeviceError if one of them is gone: the
    engine must then be loaded again.

    Ranks 1 and up use the GPUs after this one's, in order. kv_bytes: for each rank. Every rank samples, because all
    have the same logits.
    """

    patience: ClassVar[float] = 60.0  # seconds that a step may take before a rank counts as lost
    ranks: ClassVar[type[GpuRanks]] = GpuRanks

    def __init__(
        self,
        engine: Engine,
        kv_bytes: int | None = None,
        cuda: Cuda | None = None,
        section: str = "",
        swap_bytes: int | None = None,
    ) -> None:
        self.group: GpuRanks | None = None
        self._orders: list[Order] = []
        self._ordering = Lock()
        super().__init__(engine, kv_bytes, cuda, section, swap_bytes)
        self._phases = {id(phase): number for number, phase in enumerate(self.plan.phases)}
        self._shared = SharedTurns(self.turns, shared_sizes(self))
        self._watchdog = Watchdog(self.patience, self._late)
        try:
            self._start(engine, section)
        except BaseException:
            self.close()
            raise

    def _start(self, engine: Engine, section: str) -> None:
        count, peers = engine.manifest.ranks, Peers(self.cuda, 0)
        hellos = [
            GpuRankHello(
                path=str(engine.path.resolve()), digest=engine.manifest.digest, program=rank_program(rank), rank=rank,
                count=count, verify=engine.files.verifies, num_blocks=list(self.cache.num_blocks), section=section,
                device=self.cuda.ordinal + rank, host_blocks=list(self.host.num_blocks),
            )
            for rank in range(1, count)
        ]  # fmt: skip
        self.peers = peers
        self.group = group = self.ranks(hellos, self._shared.descriptor, self)
        nccl = find_nccl(engine.manifest.backend) if exchanges(self.plan) else None
        meet = Meet([peers.handle, *group.handles], nccl.unique_id() if nccl else b"")
        group.post(msgspec.msgpack.encode(meet))
        introduce(peers, meet, nccl, self.cuda)
        group.begin(self.patience)

    def send(self, turn: int, num_seqs: int, num_tokens: int) -> None:
        """Send the arrays to all ranks, through the shared memory."""
        for (own, rows), there in zip(self.sides(turn, num_seqs, num_tokens), self._shared.sides[turn], strict=True):
            first = own.first(rows)
            there[: len(first)] = first
        self._order(Send(turn, num_seqs, num_tokens))
        super().send(turn, num_seqs, num_tokens)

    def zero(self, offset: int, nbytes: int) -> None:
        """Fill bytes [offset, offset + nbytes) of the KV caches of all ranks with zeros."""
        self._order(Zero(offset, nbytes))
        super().zero(offset, nbytes)

    def copy(self, source: int, target: int, nbytes: int) -> None:
        """Copy `nbytes` bytes from byte `source` of the KV caches of all ranks to their byte `target`."""
        self._order(Copy(source, target, nbytes))
        super().copy(source, target, nbytes)

    def swap_out(self, cache: int, host: int, nbytes: int) -> None:
        """As CudaDevice: each rank keeps its own part in its host memory."""
        self._order(Swap(True, cache, host, nbytes))
        super().swap_out(cache, host, nbytes)

    def swap_in(self, cache: int, host: int, nbytes: int) -> None:
        """As CudaDevice: each rank copies its own part back."""
        self._order(Swap(False, cache, host, nbytes))
        super().swap_in(cache, host, nbytes)

    def expect(self, work: DeviceWork) -> None:
        """Capture a graph of this work on all ranks."""
        self._run(work, expected=True)
        super().expect(work)

    def run(self, work: DeviceWork) -> None:
        """Run the work on all ranks."""
        self._run(work)
        super().run(work)

    def _run(self, work: DeviceWork, expected: bool = False) -> None:
        phase = self._phases[id(work.phase)]
        self._order(
            RunStep(dict(work.sizes), phase, work.section, work.moves_only, expected), flush=not work.moves_only
        )

    def fetch(self, turn: int, rows: int, logits: bool) -> None:
        """As CudaDevice, for rank 0; the other ranks end their turn too, and keep what they sampled."""
        self._order(Fetch(turn))
        super().fetch(turn, rows, logits)

    def wait(self, turn: int) -> None:
        """Wait until the turn has ended; DeviceError if a rank is lost."""
        with self._watchdog.watching():
            super().wait(turn)
        self._check()

    def write(self, at: str, tokens: int, rows: np.ndarray) -> None:
        """As CudaDevice, on all ranks."""
        self._order(Write(at, tokens, rows.tobytes()))
        super().write(at, tokens, rows)

    def write_pool(self, name: str, offset: int, values: np.ndarray, only: int = -1) -> None:
        """As CudaDevice, on rank `only`, or the same values on all ranks (-1)."""
        raw = values.reshape(-1).view(np.uint8).data
        for first in range(0, len(raw) if only else 0, _PIECE):
            piece = bytes(raw[first : first + _PIECE])
            self._order(WritePool(name, offset + first, piece, only), flush=True)
        if only < 1:
            super().write_pool(name, offset, values)

    def read(self, at: str, tokens: int, nbytes: int) -> np.ndarray:
        """As CudaDevice, from rank 0: a copy of the first bytes, uint8 `[nbytes]`."""
        with self._watchdog.watching():
            found = super().read(at, tokens, nbytes)
        self._check()
        return found

    def _order(self, order: Order, flush: bool = False) -> None:
        self._check()
        with self._ordering:
            self._orders.append(order)
            if flush and self.group is not None:
                orders, self._orders = self._orders, []
                self.group.post(msgspec.msgpack.encode(orders))

    def _check(self) -> None:
        if self.group is not None and self.group.lost:
            raise DeviceError(f"{self.group.lost}: its part of the model is gone", "load the engine again")

    def _late(self) -> None:
        assert self.group is not None
        self.group.lose(f"a rank has not answered for {self.patience:g} s")

    def release(self) -> None:
        """Kill the other ranks, then release kernels on this GPU that wait for them."""
        if self.group is not None:
            self.group.kill()
        if self.peers is not None:
            self.peers.release()

    def close(self) -> None:
        """End the other ranks, then give everything back to the driver."""
        if self.group is not None:
            self.group.close()
        if hasattr(self, "_watchdog"):
            self._watchdog.close()
        if self.peers is not None and self.peers.communicator is not None:
            self.peers.communicator.close()
        super().close()
        if self._shared.sides:
            self._shared.close()


class FollowingCudaDevice(CudaDevice):
    """Rank 1 or a later one: it follows rank 0's orders. descriptor: the shared memory's file descriptor."""

    def __init__(self, engine: Engine, hello: GpuRankHello, descriptor: int, cuda: Cuda) -> None:
        super().__init__(engine, None, cuda, hello.section, None, (hello.num_blocks, hello.host_blocks))
        self._shared = SharedTurns(self.turns, shared_sizes(self), descriptor)
        self._rank, self._count, self._backend = hello.rank, hello.count, engine.manifest.backend
        self.peers = Peers(cuda, hello.rank)

    def follow(self, connection: socket.socket) -> None:
        """Meet the other ranks, then follow rank 0's orders until it ends."""
        connection.settimeout(None)
        if not (raw := connection.recv(_MOST)):
            return
        self.meet(msgspec.msgpack.decode(raw, type=Meet))
        connection.send(msgspec.msgpack.encode(RankReady()))
        while raw := connection.recv(_MOST):
            self.obey(raw)

    def meet(self, said: Meet) -> None:
        """Open the other ranks' areas. DeviceError if rank 0 has NCCL and this process has not."""
        assert self.peers is not None
        nccl = find_nccl(self._backend) if said.unique_id else None
        if said.unique_id and nccl is None:
            raise DeviceError("rank 0 has NCCL, another rank has not", "install it for all processes")
        introduce(self.peers, said, nccl, self.cuda)

    def obey(self, message: bytes) -> None:
        """Carry out the orders of a message from rank 0."""
        for order in msgspec.msgpack.decode(message, type=list[Order]):
            self._obey(order)

    def _obey(self, order: Order) -> None:
        match order:
            case Send():
                self._take(order)
            case Zero():
                self.zero(order.offset, order.nbytes)
            case Copy():
                self.copy(order.source, order.target, order.nbytes)
            case Swap():
                (self.swap_out if order.out else self.swap_in)(order.cache, order.host, order.nbytes)
            case RunStep():
                work = DeviceWork(order.sizes, self.plan.phases[order.phase], order.section, order.moves_only)
                (self.expect if order.expected else self.run)(work)
            case Fetch():
                self.fetch(order.turn, 0, False)
            case Write():
                self.write(order.at, order.tokens, np.frombuffer(order.rows, np.uint8))
            case WritePool():
                if order.only not in (-1, self._rank):
                    return
                self.write_pool(order.name, order.offset, np.frombuffer(order.values, np.uint8))

    def _take(self, order: Send) -> None:
        """Copy the arrays of a turn from the shared memory to the GPU, after the last step that used them has ended."""
        self.wait(order.turn)
        sides = self.sides(order.turn, order.num_seqs, order.num_tokens)
        for (own, rows), there in zip(sides, self._shared.sides[order.turn], strict=True):
            first = own.first(rows)
            first[:] = there[: len(first)]
        self.send(order.turn, order.num_seqs, order.num_tokens)


def exchanges(plan: LaunchPlan) -> bool:
    """Whether the plan has exchanges, for which a communicator may be used."""
    return any(launch.exchange for phase in plan.phases for every in phase.launches.values() for launch in every)


def introduce(peers: Peers, said: Meet, nccl: Nccl | None, cuda: Cuda) -> None:
    """Open the other ranks' areas and join the communicator of `nccl`; None: there is no communicator."""
    peers.meet(said.handles)
    if nccl is not None:
        peers.communicator = join(nccl, said.unique_id, peers.rank, len(said.handles), cuda.enter)


def shared_sizes(device: CudaDevice) -> list[int]:
    """The sizes in bytes of what a turn sends: all INPUTS together, then each input that the program declares."""
    inputs = nbytes_of(GPU_INPUTS, device.limits)
    return [inputs, *(nbytes_of([array], device.limits) for array in device.program.inputs)]

"""GPUs of several ranks without a GPU: a fake driver for each, whose kernels wait for each other in lockstep.

The ranks' processes are threads here, each with a mailbox. Messages arrive at random times; the rank that runs next is
random; a rank may end or hang at any message. The communicator stands for NCCL.
"""

from __future__ import annotations

import ctypes
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from random import Random
from threading import get_ident
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from building import GpuEngine
from fake_cuda import FakeDriver, FakeHip
from icc.compiler.backends.triton.lockstep import Lockstep
from icc.compiler.measure.interpret_ranks import Meeting
from icc.runtime.executor.cuda import ranked
from icc.runtime.executor.cuda.driver import Cuda
from icc.runtime.executor.cuda.rank_orders import Meet
from icc.runtime.executor.cuda.ranked import FollowingCudaDevice, GpuRankHello, RankedCudaDevice
from icc.runtime.executor.hip.bindings import HipApi
from icc.runtime.executor.player import Player


class NodeDriver(FakeDriver):
    """The driver of one GPU of a node. Its kernels access the memory of all GPUs."""

    def __init__(self, node: FakeNode, **options: Any) -> None:
        super().__init__(node.engine.objects(), count=8, **options)
        self.node = node

    def cuStreamCreate(self, flags: str) -> tuple[int, int]:  # type: ignore[override]  # noqa: N802
        self.live["stream"] += 1
        return 0, self.live["stream"]  # the second one is the side stream

    def cuMemcpyHtoDAsync(self, to: int, source: int, nbytes: int, stream: Any) -> tuple[int]:  # noqa: N802
        if stream == 2:
            ctypes.memmove(to, source, nbytes)
            return (0,)
        return self._put(lambda: ctypes.memmove(to, source, nbytes))

    def cuStreamSynchronize(self, stream: str) -> tuple[int]:  # noqa: N802
        self.node.settle(self)
        return (0,)

    def cuEventSynchronize(self, event: Any) -> tuple[int]:  # noqa: N802
        if not event.passed:
            self.node.settle(self)
        assert event.passed
        return (0,)

    def drain(self) -> None:
        while self.queue:
            self.queue.pop(0)()

    def _tensor(self, address: int, kind: str) -> torch.Tensor:
        for driver in self.node.drivers:
            try:
                return FakeDriver._tensor(driver, address, kind)
            except AssertionError:
                continue
        raise AssertionError(f"{address:#x} is no device's memory")


class FakeNode:
    """GPUs, one per rank. seed: for the order of ranks. ends, hangs: (rank, the message at which it ends or hangs)."""

    def __init__(
        self, engine: GpuEngine, seed: int = 0, ends: tuple[int, int] = (0, -1), hangs: tuple[int, int] = (0, -1),
        capability: tuple[int, int] = (9, 0), hip: bool = False,
    ) -> None:  # fmt: skip
        self.engine, self.random = engine, Random(seed)
        self.lockstep = Lockstep(lambda ready: self.random.choice(ready))
        self.drivers = [NodeDriver(self, capability=capability) for _ in range(engine.graph.ranks)]
        self.bindings = [HipApi(FakeHip(driver)) if hip else driver for driver in self.drivers]
        self.ends, self.hangs = ends, hangs
        self.group: ThreadRanks | None = None
        self.nccl = FakeNccl(self)
        self._settling: set[int] = set()

    def settle(self, driver: NodeDriver) -> None:
        """Run all work on the streams of all GPUs."""
        if get_ident() in self._settling:  # a rank that waits for its own stream while others run
            driver.drain()
            return
        works = [partial(self._settle_one, rank) for rank in range(len(self.drivers))]
        with driver.draining:
            self.lockstep.run(works)

    def _settle_one(self, rank: int) -> None:
        self._settling.add(get_ident())
        try:
            driver = self.drivers[rank]
            if rank and self.group is not None:
                self.group.run(rank)
            driver.drain()
        finally:
            self._settling.discard(get_ident())

    @contextmanager
    def installed(self, monkeypatch: pytest.MonkeyPatch, patience: float = 60.0) -> Iterator[None]:
        with monkeypatch.context() as patch:
            patch.setattr(RankedCudaDevice, "ranks", partial(ThreadRanks, self))
            patch.setattr(RankedCudaDevice, "patience", patience)
            patch.setattr(ranked, "find_nccl", lambda backend: self.nccl)
            yield

    def player(self, **options: Any) -> Player[RankedCudaDevice]:
        return Player(RankedCudaDevice(self.engine_of(0), cuda=Cuda(0, self.bindings[0]), **options))

    def engine_of(self, rank: int) -> Any:
        packed = [self.engine.packed, *self.engine.others][rank]
        files = SimpleNamespace(read=lambda path: Path(path).stem.encode(), verifies=True)
        weights = SimpleNamespace(view=lambda name: packed[name])
        program = self.engine.program
        return SimpleNamespace(
            manifest=self.engine.manifest, program=program, weights=weights, files=files, path=Path("engine")
        )


class ThreadRanks:
    """Stands for GpuRanks, with which RankedCudaDevice reaches the other ranks."""

    def __init__(self, node: FakeNode, hellos: Sequence[GpuRankHello], descriptor: int, device: Any) -> None:
        self.node, self.lost, self._lead = node, "", device
        node.group = self
        self.dead: set[int] = set()
        self.taken = dict.fromkeys(range(1, len(hellos) + 1), 0)
        self.boxes: dict[int, deque[bytes]] = {hello.rank: deque() for hello in hellos}
        self.devices: dict[int, FollowingCudaDevice] = {}
        for hello in hellos:
            again = msgspec.msgpack.decode(msgspec.msgpack.encode(hello), type=GpuRankHello)
            cuda = Cuda(again.device, node.bindings[again.rank])
            self.devices[hello.rank] = FollowingCudaDevice(node.engine_of(again.rank), again, descriptor, cuda)

    @property
    def handles(self) -> list[bytes]:
        return [device.peers.handle for device in self.devices.values() if device.peers is not None]

    def begin(self, patience: float) -> None:
        for rank, box in self.boxes.items():
            self.devices[rank].meet(msgspec.msgpack.decode(box.popleft(), type=Meet))

    def post(self, message: bytes) -> None:
        for box in self.boxes.values():
            box.append(message)

    def run(self, rank: int) -> None:
        """Process a rank's messages, as its process does."""
        box = self.boxes[rank]
        while box and rank not in self.dead:
            for _ in range(self.node.random.randrange(4)):
                self.node.lockstep.give_way(rank)
            if self.node.ends == (rank, self.taken[rank]):
                self.dead.add(rank)
                self.lose(f"rank {rank} has ended with -9")
                return
            while self.node.hangs == (rank, self.taken[rank]) and rank not in self.dead:
                time.sleep(0.01)
                self.node.lockstep.give_way(rank)
            if rank in self.dead:
                return
            self.taken[rank] += 1
            self.devices[rank].obey(box.popleft())
            self.node.drivers[rank].drain()

    def lose(self, reason: str) -> None:
        self.lost = self.lost or reason
        self._lead.release()

    def kill(self) -> None:
        self.dead |= set(self.boxes)
        self.node.nccl.meeting.aborted = True

    def close(self) -> None:
        for rank, device in self.devices.items():
            if rank not in self.dead:
                self.run(rank) if not self.boxes[rank] else None
            self.node.drivers[rank].queue.clear()
            device.close()
        self.node.group = None


class FakeNccl:
    """Stands for `Nccl`: exchanges wait on the stream of each rank."""

    def __init__(self, node: FakeNode) -> None:
        self.node, self.calls = node, list[str]()
        self.meeting = Meeting(node.lockstep, len(node.drivers))

    def unique_id(self) -> bytes:
        return bytes(range(128))

    def call(self, name: str, *args: Any) -> None:
        self.calls.append(name)
        do: Callable[..., None] | None = getattr(self, f"_{name}", None)
        if do is not None:
            do(*args)

    def _ncclCommInitRank(self, comm: Any, count: int, unique_id: Any, rank: int) -> None:  # noqa: N802
        assert bytes(unique_id.content) == self.unique_id() and count == len(self.node.drivers)
        comm._obj.value = rank + 1

    def _ncclAllReduce(self, source: int, target: int, count: int, kind: int, op: int, *rest: Any) -> None:  # noqa: N802
        self._put("all_reduce", source, target, count, *rest, kind=kind, op=op)

    def _ncclAllGather(self, source: int, target: int, count: int, kind: int, *rest: Any) -> None:  # noqa: N802
        self._put("all_gather", source, target, count, *rest, kind=kind)

    def _ncclReduceScatter(self, source: int, target: int, count: int, kind: int, op: int, *rest: Any) -> None:  # noqa: N802
        self._put("reduce_scatter", source, target, count, *rest, kind=kind, op=op)

    def _ncclReduce(  # noqa: N802
        self, source: int, target: int, count: int, kind: int, op: int, root: int, *rest: Any
    ) -> None:
        self._put("reduce", source, target, count, *rest, kind=kind, op=op, root=root)

    def _ncclBroadcast(self, source: int, target: int, count: int, kind: int, root: int, *rest: Any) -> None:  # noqa: N802
        self._put("broadcast", source, target, count, *rest, kind=kind, root=root)

    def _put(
        self, name: str, source: int, target: int, count: int, comm: Any, stream: Any, kind: int, op: int = 0,
        root: int | None = None,
    ) -> None:  # fmt: skip
        rank, ranks = comm.value - 1, len(self.node.drivers)
        assert (kind, op) == (7, 0) and root in (None, ranks - 1) and count > 0
        driver = self.node.drivers[rank]

        def exchange() -> None:
            x, y = driver._tensor(source, "*fp32"), driver._tensor(target, "*fp32")
            self.meeting.exchange(name, rank, x, y, count)

        driver._put(exchange)

"""RankGroup: the processes that run an engine's program together with this one, each on cores of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from threading import Thread

import msgspec

from ...errors import DeviceError, EngineFormatError
from .cores import read_text
from .rank_memory import RankMemory

START_S = 120.0  # seconds until a rank has loaded its weights
_END_S = 5.0
_MOST = 1 << 20  # bytes of a message


class RankHello(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a rank's process is told first, beside the descriptor of the shared memory. digest: of the engine's
    manifest, which must be the same."""

    path: str
    digest: str
    program: str
    rank: int
    count: int
    isa: str
    verify: bool
    threads: int
    cores: list[int] | None
    num_blocks: list[int]
    section: str


class RankReady(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rank's answer: it follows from here on; or why it cannot."""

    message: str = ""
    hint: str = ""


class RankGroup:
    """Ranks 1 and up of an engine. DeviceError where one cannot start.

    A rank that ends, however that happens, is seen at once, and steps fail from then on.
    """

    def __init__(self, memory: RankMemory, hellos: Sequence[RankHello]) -> None:
        self._memory, self._closing = memory, False
        self.lost = ""  # which rank is gone, in words
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            sockets = [self._start(hello) for hello in hellos]
            for hello, connection in zip(hellos, sockets, strict=True):
                _expect_ready(hello.rank, connection)
        except BaseException:
            self.close()
            raise
        for number, process in enumerate(self._processes, 1):
            Thread(target=self._watch, args=(number, process), daemon=True, name=f"icc-rank-{number}").start()

    @property
    def pids(self) -> list[int]:
        """Process ids, of ranks 1 and up."""
        return [process.pid for process in self._processes]

    def _start(self, hello: RankHello) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(START_S)
        with theirs:
            command = [sys.executable, "-P", "-m", f"{__package__}.rank_main", str(theirs.fileno())]
            self._processes.append(
                subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=_environment())
            )
        socket.send_fds(ours, [msgspec.msgpack.encode(hello)], [self._memory.descriptor])
        return ours

    def _watch(self, number: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        if not self._closing:
            self.lost = self.lost or f"rank {number} has ended with {code}"
            self._memory.stop()

    def close(self) -> None:
        """End the processes: those that were told to follow no more end by themselves."""
        self._closing = True
        for process in self._processes:
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _expect_ready(rank: int, connection: socket.socket) -> None:
    with connection:
        try:
            raw = connection.recv(_MOST)
        except TimeoutError:
            raise DeviceError(f"rank {rank} has not started within {START_S:.0f} s", "is the machine busy?") from None
        if not raw:
            raise DeviceError(f"rank {rank} ended while it loaded the engine", "its messages are above")
        answer = msgspec.msgpack.decode(raw, type=RankReady)
        if answer.message:
            raise EngineFormatError(f"rank {rank}: {answer.message}", answer.hint)


def _environment() -> dict[str, str]:
    """The environment of a process that is to import this package, which may lie within an engine."""
    top, *inner = str(__package__).split(".")
    if top != "runtime":
        return dict(os.environ)
    root = str(Path(__file__).resolve().parents[len(inner) + 1])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))}


def cores_by_rank(count: int, allowed: frozenset[int] | None = None) -> list[list[int] | None]:
    """The cores of each rank, neighbours together, so that a rank has its own socket where there are several; None of
    each where there are fewer cores than ranks. allowed: of these; None: of those that this process may use."""
    cpus = sorted(allowed if allowed is not None else os.sched_getaffinity(0), key=_place)
    cores = list({_siblings(cpu): cpu for cpu in reversed(cpus)}.values())[::-1]
    if len(cores) < count:
        return [None] * count
    size = len(cores) // count
    return [cores[rank * size : (rank + 1) * size] for rank in range(count)]


def _place(cpu: int) -> tuple[int, int]:
    package = read_text(f"/sys/devices/system/cpu/cpu{cpu}/topology/physical_package_id")
    return int(package or 0), cpu


def _siblings(cpu: int) -> str:
    return read_text(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") or str(cpu)

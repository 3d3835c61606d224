"""The processes of ranks 1 and up: how they start, what they are told first, and that none outlives the others.

A rank hears its hello over a socket that it inherits, beside the descriptor of memory that all ranks share. No port is
opened, and no memory has a name.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import TypeVar

import msgspec

from ..errors import DeviceError, EngineFormatError, IccError
from ..format.files import DigestPieces
from ..format.load import Engine, begin_opening, read_manifest
from ..parent import deaf_to_signals, die_with_parent

START_S = 120.0  # seconds until a rank has loaded its weights
_END_S = 5.0
_TOLD_S = 1.0  # seconds from the end of a process's socket until the process itself has ended
_MOST = 1 << 20  # bytes of a message


class RankHello(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a rank's process is told first. digest: of the engine's manifest, which must be the same. num_blocks: of
    each KV group, the same on all ranks."""

    path: str
    digest: str
    program: str
    rank: int
    count: int
    verify: bool
    num_blocks: list[int]
    section: str


class RankReady(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rank's answer: it follows from here on; or why it cannot. memory: what others find its area by."""

    message: str = ""
    hint: str = ""
    memory: bytes = b""


H = TypeVar("H", bound=RankHello)


class RankProcesses:
    """Ranks 1 and up. DeviceError where one cannot start.

    module: what they run, given the number of their socket. descriptor: of the memory that they share with this
    process. A rank that ends, however that happens, is seen at once: `lost` says which, and `on_loss` is called.
    """

    def __init__(self, module: str, hellos: Sequence[RankHello], descriptor: int, on_loss: Callable[[], None]) -> None:
        self._on_loss, self._closing = on_loss, False
        self.lost = ""  # which rank is gone, in words
        self._processes: list[subprocess.Popen[bytes]] = []
        self.connections: list[socket.socket] = []
        try:
            for hello in hellos:
                self._start(module, hello, descriptor)
            self.answers = self.expect_ready()
        except BaseException:
            self.kill()
            raise
        self._watchers = [
            Thread(target=self._watch, args=(number, process), daemon=True, name=f"icc-rank-{number}")
            for number, process in enumerate(self._processes, 1)
        ]
        for watcher in self._watchers:
            watcher.start()

    @property
    def pids(self) -> list[int]:
        """Process ids, of ranks 1 and up."""
        return [process.pid for process in self._processes]

    def _start(self, module: str, hello: RankHello, descriptor: int) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(START_S)
        self.connections.append(ours)
        with theirs, deaf_to_signals():  # rank 0 decides when the others end
            command = [sys.executable, "-P", "-m", module, str(theirs.fileno())]
            self._processes.append(
                subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=_environment())
            )
        socket.send_fds(ours, [msgspec.msgpack.encode(hello)], [descriptor])

    def expect_ready(self) -> list[RankReady]:
        """What each rank answers."""
        return [_ready_of(rank, connection) for rank, connection in enumerate(self.connections, 1)]

    def _watch(self, number: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        if not self._closing:
            self.lose(f"rank {number} has ended with {code}")

    def lose_unreachable(self, rank: int, error: OSError) -> None:
        """A rank does not listen. Where its process has ended, the code that it ended with is the reason."""
        self._watchers[rank - 1].join(_TOLD_S)
        if not self.lost:
            self.lose(f"rank {rank} takes no more orders: {error}")

    def lose(self, reason: str) -> None:
        """Tell all that wait that a rank is gone. The first reason is kept."""
        self.lost = self.lost or reason
        self._on_loss()

    def hang_up(self) -> None:
        """Close the connections to the ranks: a rank that waits for an order then ends."""
        for connection in self.connections:
            connection.close()

    def kill(self) -> None:
        """Kill the processes, and wait for them."""
        for process in self._processes:
            process.kill()
        self.close()

    def close(self) -> None:
        """Wait for the processes: those that were told to follow no more end by themselves."""
        self._closing = True
        self.hang_up()
        for process in self._processes:
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _ready_of(rank: int, connection: socket.socket) -> RankReady:
    try:
        raw = connection.recv(_MOST)
    except TimeoutError:
        raise DeviceError(f"rank {rank} has not started within {START_S:.0f} s", "is the machine busy?") from None
    except ConnectionError:
        raw = b""
    if not raw:
        raise DeviceError(f"rank {rank} ended while it loaded the engine", "its messages are above")
    answer = msgspec.msgpack.decode(raw, type=RankReady)
    if answer.message:
        raise EngineFormatError(f"rank {rank}: {answer.message}", answer.hint)
    return answer


def _environment() -> dict[str, str]:
    """The environment of a process that imports this package, which may lie within an engine."""
    top, *inner = str(__package__).split(".")
    if top != "runtime":
        return dict(os.environ)
    root = str(Path(__file__).resolve().parents[len(inner) + 1])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))}


Follow = Callable[[], object]


def run_rank(descriptor: int, kind: type[H], start: Callable[[H, int, socket.socket], tuple[RankReady, Follow]]) -> int:
    """A rank's process: `start` gets its hello, the shared memory's descriptor and the socket, and gives what to answer
    and what to do until rank 0 ends. Does not return but where it cannot start: with the exit status of its error."""
    die_with_parent()
    with socket.socket(fileno=descriptor) as connection:
        raw, [shared], *_ = socket.recv_fds(connection, _MOST, 1)
        hello = msgspec.msgpack.decode(raw, type=kind)
        try:
            answer, follow = start(hello, shared, connection)
        except IccError as error:
            with suppress(OSError):
                connection.send(msgspec.msgpack.encode(RankReady(error.message, error.hint)))
            return error.exit_code
        connection.send(msgspec.msgpack.encode(answer))
        follow()
    os._exit(0)  # nothing is left to give back: its threads may be between two steps


def open_rank(
    hello: RankHello, isa: str | None = None, load_digests: Callable[[bytes, str], DigestPieces] | None = None
) -> Engine:
    """The engine's program of a rank. EngineFormatError where it is not the engine of rank 0."""
    manifest = read_manifest(Path(hello.path))
    if manifest.digest != hello.digest:
        raise EngineFormatError("the engine has changed since rank 0 opened it", "load it again")
    opening = begin_opening(
        hello.path, manifest, verify=hello.verify, isa=isa, load_digests=load_digests, program=hello.program
    )
    return opening.finish()

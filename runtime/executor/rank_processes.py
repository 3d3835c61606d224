"""The processes of ranks 1 and up: starts them, sends each its first message, and makes sure that none outlives the
others.

A rank gets its hello over an inherited socket, with the descriptor of the memory that all ranks share. No port is
opened, and the memory has no name.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread, Timer
from typing import TypeVar

import msgspec

from ..errors import DeviceError, EngineFormatError, IccError
from ..format.files import DigestPieces
from ..format.load import Engine, begin_opening, read_manifest
from ..parent import deaf_to_signals, die_with_parent

START_S = 120.0  # seconds that a rank may take to load its weights
HALTED_S = 60  # seconds that a rank may be stopped (SIGSTOP) before it counts as lost
_END_S = 5.0
_TOLD_S = 1.0  # seconds that a process may take to end after its socket was closed
_MOST = 1 << 20  # bytes of a message


class RankHello(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The first message to a rank's process. digest: of the engine's manifest, which must match. num_blocks: of each KV
    group, the same on all ranks."""

    path: str
    digest: str
    program: str
    rank: int
    count: int
    verify: bool
    num_blocks: list[int]
    section: str


class RankReady(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rank's answer to its hello: it is ready, or (message, hint) why it is not. memory: the handle of its area, see
    `Peers.handle`."""

    message: str = ""
    hint: str = ""
    memory: bytes = b""


H = TypeVar("H", bound=RankHello)


class RankProcesses:
    """The processes of ranks 1 and up. DeviceError if one cannot start.

    module: the Python module that they run; its argument is the descriptor of their socket. descriptor: of the memory
    that they share with this process. If a rank ends for any reason, `lost` names it at once and `on_loss` is called.
    """

    def __init__(self, module: str, hellos: Sequence[RankHello], descriptor: int, on_loss: Callable[[], None]) -> None:
        self._on_loss, self._closing = on_loss, False
        self.lost = ""  # which rank is gone, in words
        self._halted: set[int] = set()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._watchers: list[Thread] = []
        self._begun = Event()  # until it is set, the constructor itself notices ranks that end
        self.connections: list[socket.socket] = []
        try:
            for hello in hellos:
                self._start(module, hello, descriptor)
            self.answers = self.expect_ready()
        except BaseException:
            self.kill()
            raise
        self._begun.set()

    @property
    def pids(self) -> list[int]:
        """The process ids of ranks 1 and up."""
        return [process.pid for process in self._processes]

    @property
    def halted(self) -> bool:
        """Whether a rank is stopped (SIGSTOP) and may still continue."""
        return bool(self._halted)

    def _start(self, module: str, hello: RankHello, descriptor: int) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(START_S)
        self.connections.append(ours)
        started: Future[None] = Future()
        name, asked = f"icc-rank-{hello.rank}", (hello.rank, module, theirs, started)
        self._watchers.append(Thread(target=self._live, args=asked, daemon=True, name=name))
        self._watchers[-1].start()
        started.result()
        socket.send_fds(ours, [msgspec.msgpack.encode(hello)], [descriptor])

    def expect_ready(self) -> list[RankReady]:
        """Wait for the answer of each rank. DeviceError or EngineFormatError if one cannot start."""
        return [_ready_of(rank, connection) for rank, connection in enumerate(self.connections, 1)]

    def _live(self, number: int, module: str, connection: socket.socket, started: Future[None]) -> None:
        """The body of a thread that starts a process and waits for its end. The kernel treats the starting thread as
        the parent with which the process ends (see `die_with_parent`), and the thread that loads an engine may end
        sooner."""
        try:
            with connection, deaf_to_signals():  # rank 0 decides when the others end
                command = [sys.executable, "-P", "-m", module, str(connection.fileno())]
                process = subprocess.Popen(
                    command, pass_fds=[connection.fileno()], stdin=subprocess.DEVNULL, env=_environment()
                )
        except BaseException as error:
            started.set_exception(error)
            return
        self._processes.append(process)
        if self._closing:  # the constructor was interrupted
            process.kill()
        started.set_result(None)
        self._watch(number, process)

    def _watch(self, number: int, process: subprocess.Popen[bytes]) -> None:
        def tell(stopped: bool) -> None:
            (self._halted.add if stopped else self._halted.discard)(number)

        halted = _halted_or_ended(process.pid, tell)
        code = None if halted else process.wait()
        self._begun.wait()
        if not self._closing:
            said = f"is stopped, for {HALTED_S} s by now" if halted else f"has ended with {code}"
            self.lose(f"rank {number} {said}")
        if halted:
            process.kill()
            process.wait()

    def lose_unreachable(self, rank: int, error: OSError) -> None:
        """Report a rank that cannot be reached as lost. If its process has ended, its exit code is the reason."""
        self._watchers[rank - 1].join(_TOLD_S)
        if not self.lost:
            self.lose(f"rank {rank} takes no more orders: {error}")

    def lose(self, reason: str) -> None:
        """Report that a rank is gone, by `on_loss`. The first reason is kept."""
        self.lost = self.lost or reason
        self._on_loss()

    @contextmanager
    def ending(self) -> Iterator[None]:
        """A context in which ranks are told to end; a rank that hangs is reported as lost after a time limit."""
        late = Timer(_END_S, self.lose, ("a rank does not end",))
        late.daemon = True
        late.start()
        try:
            yield
        finally:
            late.cancel()

    def hang_up(self) -> None:
        """Close the connections to the ranks; a rank that waits for an order then ends."""
        for connection in self.connections:
            connection.close()

    def kill(self) -> None:
        """Kill the processes, and wait for them."""
        self._closing = True
        for process in self._processes:
            process.kill()
        self.close()

    def close(self) -> None:
        """Wait for the processes, which end by themselves when their connection is closed; kill those that do not end
        in time."""
        self._closing = True
        self._begun.set()
        self.hang_up()
        for process in self._processes:
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _halted_or_ended(pid: int, tell: Callable[[bool], None]) -> bool:
    """Wait until a child process ends, or has been stopped for HALTED_S seconds of this process's own running time;
    True if it is stopped. An ended process is not reaped. tell: called with True when it is stopped, with False when it
    continues."""
    ends = os.WEXITED | os.WNOWAIT
    with suppress(ChildProcessError):  # it was reaped already
        while (found := os.waitid(os.P_PID, pid, ends | os.WSTOPPED)) is not None and found.si_code == os.CLD_STOPPED:
            os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG)  # consume the event, which is reported once
            tell(True)
            for _ in range(HALTED_S):
                if os.waitid(os.P_PID, pid, ends | os.WCONTINUED | os.WNOHANG) is not None:
                    os.waitid(os.P_PID, pid, os.WCONTINUED | os.WNOHANG)
                    tell(False)
                    break
                time.sleep(1)
            else:
                return True
    return False


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
    """The environment for a process that imports this package, which may lie within an engine."""
    top, *inner = str(__package__).split(".")
    if top != "runtime":
        return dict(os.environ)
    root = str(Path(__file__).resolve().parents[len(inner) + 1])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))}


Follow = Callable[[], object]


def run_rank(descriptor: int, kind: type[H], start: Callable[[H, int, socket.socket], tuple[RankReady, Follow]]) -> int:
    """The main function of a rank's process. `start` gets the hello, the shared memory's descriptor and the socket, and
    returns the answer and a function that runs until rank 0 ends. Returns (the exit status) only if the rank cannot
    start."""
    die_with_parent()
    with socket.socket(fileno=descriptor) as connection:
        raw, shared, *_ = socket.recv_fds(connection, _MOST, 1)
        if not raw:
            return 1  # rank 0 has gone
        hello = msgspec.msgpack.decode(raw, type=kind)
        try:
            answer, follow = start(hello, shared[0], connection)
        except IccError as error:
            with suppress(OSError):
                connection.send(msgspec.msgpack.encode(RankReady(error.message, error.hint)))
            return error.exit_code
        try:
            connection.send(msgspec.msgpack.encode(answer))
        except OSError:
            os._exit(1)  # rank 0 has gone
        follow()
    os._exit(0)  # nothing to free, and threads may be between two steps


def open_rank(
    hello: RankHello, isa: str | None = None, load_digests: Callable[[bytes, str], DigestPieces] | None = None
) -> Engine:
    """Open the engine with a rank's program. isa, load_digests: see `open_engine`. EngineFormatError if it is not the
    engine that rank 0 opened."""
    manifest = read_manifest(Path(hello.path))
    if manifest.digest != hello.digest:
        raise EngineFormatError("the engine has changed since rank 0 opened it", "load it again")
    opening = begin_opening(
        hello.path, manifest, verify=hello.verify, isa=isa, load_digests=load_digests, program=hello.program
    )
    return opening.finish()

"""The processes of ranks 1 and up: how they start, what they are told first, and that none outlives the others.

A rank hears its hello over a socket that it inherits, beside the descriptor of memory that all ranks share. No port is
opened, and no memory has a name.
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

START_S = 120.0  # seconds until a rank has loaded its weights
HALTED_S = 60  # seconds that a rank may be stopped (SIGSTOP) before it counts as lost
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
        self._halted: set[int] = set()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._watchers: list[Thread] = []
        self._begun = Event()  # before that, who starts the ranks sees which have ended
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
        """Process ids, of ranks 1 and up."""
        return [process.pid for process in self._processes]

    @property
    def halted(self) -> bool:
        """Whether a rank is stopped (SIGSTOP), and may go on."""
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
        """What each rank answers."""
        return [_ready_of(rank, connection) for rank, connection in enumerate(self.connections, 1)]

    def _live(self, number: int, module: str, connection: socket.socket, started: Future[None]) -> None:
        """A thread that starts a process and stays until that ends: the kernel takes the thread for its parent, with
        which it ends (see `die_with_parent`), and what loads an engine may be a thread that ends sooner."""
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
        if self._closing:  # whoever started it was interrupted
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
        """A rank does not listen. Where its process has ended, the code that it ended with is the reason."""
        self._watchers[rank - 1].join(_TOLD_S)
        if not self.lost:
            self.lose(f"rank {rank} takes no more orders: {error}")

    def lose(self, reason: str) -> None:
        """Tell all that wait that a rank is gone. The first reason is kept."""
        self.lost = self.lost or reason
        self._on_loss()

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Ranks are told in here that this is the end: those that hang are waited for no longer than it takes."""
        late = Timer(_END_S, self.lose, ("a rank does not end",))
        late.daemon = True
        late.start()
        try:
            yield
        finally:
            late.cancel()

    def hang_up(self) -> None:
        """Close the connections to the ranks: a rank that waits for an order then ends."""
        for connection in self.connections:
            connection.close()

    def kill(self) -> None:
        """Kill the processes, and wait for them."""
        self._closing = True
        for process in self._processes:
            process.kill()
        self.close()

    def close(self) -> None:
        """Wait for the processes: those that were told to follow no more end by themselves."""
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
    """Wait until a child process ends, or was stopped for HALTED_S seconds of which this process ran; whether it is
    stopped. The process that has ended is left to be waited for. tell: called when it is stopped, and when it is not
    any more."""
    ends = os.WEXITED | os.WNOWAIT
    with suppress(ChildProcessError):  # somebody has waited for it
        while (found := os.waitid(os.P_PID, pid, ends | os.WSTOPPED)) is not None and found.si_code == os.CLD_STOPPED:
            os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG)  # it is told of once
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
    os._exit(0)  # nothing is left to give back: its threads may be between two steps


def open_rank(
    hello: RankHello, isa: str | None = None, load_digests: Callable[[bytes, str], DigestPieces] | None = None
) -> Engine:
    """The engine's program of a rank. isa, load_digests: see `open_engine`. EngineFormatError where it is not the
    engine of rank 0."""
    manifest = read_manifest(Path(hello.path))
    if manifest.digest != hello.digest:
        raise EngineFormatError("the engine has changed since rank 0 opened it", "load it again")
    opening = begin_opening(
        hello.path, manifest, verify=hello.verify, isa=isa, load_digests=load_digests, program=hello.program
    )
    return opening.finish()

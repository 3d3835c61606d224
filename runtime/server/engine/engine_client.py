"""EngineClient: starts the engine process, talks to it, and says so when it dies or hangs."""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from ...errors import IccError
from ...options import LoadOptions
from ..log import LogOptions, with_fields
from .messages import (
    AdapterDone,
    AdapterStats,
    Cancel,
    Delta,
    Embedded,
    Failed,
    Frames,
    FromEngine,
    LoadAdapter,
    PromptLogprobs,
    Ready,
    Report,
    Stats,
    Submit,
    UnloadAdapter,
)
from .messages import encode as encode_message

log = logging.getLogger("icc.serve")
_RELOADING = "the engine takes up new weights"
_DRAIN_S = 0.02
_BACKOFF_S = (0.1, 30.0)  # first and longest wait before the engine is started again
_SOCKET_BYTES = 4 << 20


class EngineFailed(IccError):
    """The request cannot be answered: the engine process refused it, died or hangs. `status` is the HTTP status;
    `began` says whether the engine had the request when it failed."""

    def __init__(self, status: int, message: str, field: str = "", began: bool = False) -> None:
        super().__init__(message)
        self.status, self.field, self.began = status, field, began


class EngineStream:
    """What comes back for the prompts of one request, until every completion has ended or `EngineFailed`.

    The prompts' ids follow one another from `first_id`. `prompt_logprobs` and `embeddings` are by id.
    """

    def __init__(self, first_id: int, prompts: int, completions: int) -> None:
        self.first_id, self.prompts = first_id, prompts
        self.open = prompts * completions
        self.prompt_logprobs: dict[int, PromptLogprobs] = {}
        self.embeddings: dict[int, bytes] = {}
        self._deltas: deque[Delta] = deque()
        self._failed: EngineFailed | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def ids(self) -> range:
        """The ids of its prompts."""
        return range(self.first_id, self.first_id + self.prompts)

    async def take(self) -> list[Delta]:
        """The deltas that came since the last call, at least one. Raises EngineFailed."""
        while not self._deltas:
            if self._failed is not None:
                raise self._failed
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        deltas = list(self._deltas)
        self._deltas.clear()
        return deltas

    def push(self, delta: Delta) -> None:
        """Take a delta from the engine, and wake who waits for one."""
        self._deltas.append(delta)
        self.open -= delta.reason is not None
        self._wake()

    def add(self, found: PromptLogprobs | Embedded) -> None:
        """Keep what was found of a prompt."""
        if isinstance(found, Embedded):
            self.embeddings[found.id] = found.vector
        else:
            self.prompt_logprobs[found.id] = found

    def fail(self, error: EngineFailed) -> None:
        """End with an error, and wake who waits."""
        self._failed = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class EngineClient:
    """One engine process at a time, started again after it has died or been killed because it hung.

    command: the process; the number of its socket's descriptor is put in place of "{fd}". watchdog_s: an engine that
    says nothing for so long hangs. observe: called with every report of a step.
    """

    def __init__(
        self, command: Sequence[str], watchdog_s: float = 10.0, observe: Callable[[Report], None] | None = None
    ) -> None:
        self._command = command
        self._watchdog_s = watchdog_s
        self.observe = observe or (lambda report: None)
        self._decoder = msgspec.msgpack.Decoder(FromEngine)
        self._transport: asyncio.Transport | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._streams: dict[int, EngineStream] = {}
        self._asked: dict[int, asyncio.Future[None]] = {}  # about adapters
        self.on_ready: Callable[[], None] = lambda: None  # called when an engine process has loaded the engine
        self._next_id = 0
        self._lost = asyncio.Event()
        self._started: asyncio.Future[Ready] | None = None
        self._reloaded: asyncio.Future[None] | None = None  # while the engine is loaded anew
        self._replacing = False  # the process that runs ends on purpose
        self._supervisor: asyncio.Task[None] | None = None
        self._heard = 0.0
        self.facts: Ready | None = None  # of the engine that is ready; None where none is
        self.stats = Stats()
        self.adapters: AdapterStats | None = None
        self.restarts = 0

    @property
    def pid(self) -> int | None:
        """Process id of the engine."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Start the process and wait until it is loaded. IccError with its exit code if it cannot be."""
        self._started = asyncio.get_running_loop().create_future()
        self._supervisor = asyncio.create_task(self._supervise())
        await self._started

    async def stop(self) -> None:
        """End the process; streams that are open fail."""
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)
        await self._end_process("the server has stopped")

    def submit(self, submits: Sequence[Submit]) -> EngineStream:
        """Send the prompts of one request (their ids are given here). EngineFailed, status 503, if none is ready."""
        if self._reloaded is not None:
            raise EngineFailed(503, _RELOADING)
        if self._transport is None or self.facts is None:
            raise EngineFailed(503, "the engine is not ready")
        stream = EngineStream(self._next_id, len(submits), submits[0].params.n)
        for submit, submit_id in zip(submits, stream.ids, strict=True):
            self._streams[submit_id] = stream
            self._transport.write(encode_message(msgspec.structs.replace(submit, id=submit_id)))
        self._next_id += len(submits)
        return stream

    async def ask(self, question: LoadAdapter | UnloadAdapter) -> None:
        """Have something done about an adapter (its id is given here). EngineFailed where it cannot be."""
        if self._transport is None or self.facts is None:
            raise EngineFailed(503, "the engine is not ready")
        number, self._next_id = self._next_id, self._next_id + 1
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        self._transport.write(encode_message(msgspec.structs.replace(question, id=number)))
        try:
            await answer
        finally:
            self._asked.pop(number, None)

    async def reload(self, wait_s: float) -> None:
        """Load the engine anew from its directory, in another process. Requests that run have `wait_s` seconds to end
        and fail after that; new ones are refused meanwhile. EngineFailed where it is under way already, or the engine
        cannot be loaded, which is tried again then."""
        if self._reloaded is not None or self.facts is None:
            raise EngineFailed(503, _RELOADING if self._reloaded else "the engine is not ready")
        self._reloaded = asyncio.get_running_loop().create_future()
        try:
            end = time.monotonic() + wait_s
            while self._streams and time.monotonic() < end:
                await asyncio.sleep(_DRAIN_S)
            if self.facts is not None and not self._reloaded.done():  # else it died meanwhile: `_supervise` says so
                self._replacing = True
                self._lost.set()
            await self._reloaded
        finally:
            self._reloaded = None

    def close(self, stream: EngineStream) -> None:
        """Nobody reads the stream any more: what is not finished of it is cancelled."""
        for submit_id in stream.ids:
            if self._streams.pop(submit_id, None) is not None and stream.open and self._transport is not None:
                self._transport.write(encode_message(Cancel(submit_id)))

    # -- the process -------------------------------------------------------------------------------------------------

    async def _supervise(self) -> None:
        wait = _BACKOFF_S[0]
        while True:
            try:
                await self._spawn()
                began = time.monotonic()
                reason = await self._watch()
            except OSError as error:
                began, reason = time.monotonic(), f"cannot be started: {error}"
            failing = len(set(self._streams.values()))
            if self._replacing:
                self._replacing = False
                await self._end_process(_RELOADING)
                continue
            await self._end_process(f"the engine {reason}")
            self._settle_reload(EngineFailed(503, f"the engine {reason}"))
            if self._started is not None and not self._started.done():
                self._started.set_exception(IccError(f"the engine process {reason}"))
            if self._started is not None and self._started.exception() is not None:
                return  # it could not be loaded the first time: that is for whoever called `start`
            wait = _BACKOFF_S[0] if time.monotonic() - began > _BACKOFF_S[1] else min(wait * 2, _BACKOFF_S[1])
            fields = with_fields(requests_failed=failing, restart=self.restarts + 1, wait_s=wait)
            log.error("the engine %s, and is started again", reason, extra=fields)
            await asyncio.sleep(wait)
            self.restarts += 1

    async def _spawn(self) -> None:
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
        with theirs:
            command = [part.replace("{fd}", str(theirs.fileno())) for part in self._command]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        self._lost.clear()
        self._heard = time.monotonic()
        ours.setblocking(False)
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_unix_connection(lambda: _Pipe(self._receive, self._lost), sock=ours)
        # what is not sent yet is bounded by admission, not by the transport
        self._transport.set_write_buffer_limits(high=1 << 30)

    async def _watch(self) -> str:
        """Wait until the process has died or hangs; what happened, in words."""
        interval = min(0.25, self._watchdog_s / 4)
        while True:
            begin = time.monotonic()
            try:
                await asyncio.wait_for(self._lost.wait(), interval)
                return "died"
            except TimeoutError:
                late = time.monotonic() - begin - interval
                if late > interval:  # this process was stopped itself, and has not read what the engine said meanwhile
                    self._heard += late
                silent = time.monotonic() - self._heard
                if self.facts is not None and silent > self._watchdog_s:
                    return f"hangs: it has said nothing for {silent:.1f} s"

    async def _end_process(self, reason: str) -> None:
        self.facts = None
        self.stats, self.adapters = Stats(), None
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(EngineFailed(503, reason, began=True))
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(EngineFailed(503, reason))
        if self._transport is not None:
            self._transport.close()
            self._transport = None
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            await asyncio.to_thread(process.wait)

    # -- messages ----------------------------------------------------------------------------------------------------

    def _receive(self, body: bytes) -> None:
        self._heard = time.monotonic()
        message = self._decoder.decode(body)
        if isinstance(message, Report):
            self._take_report(message)
        elif isinstance(message, AdapterDone):
            self._answer(message.id, None)
        elif isinstance(message, Failed):
            error = EngineFailed(message.status, message.message, message.field)
            if not self._answer(message.id, error) and (stream := self._streams.pop(message.id, None)) is not None:
                stream.fail(error)
        elif isinstance(message, PromptLogprobs | Embedded):
            if (stream := self._streams.get(message.id)) is not None:
                stream.add(message)
        elif isinstance(message, Ready):
            self.facts = message
            fields = with_fields(pid=self.pid, restarts=self.restarts, load_s=round(message.load_s, 2))
            log.info("the engine is ready", extra=fields)
            self.on_ready()
            self._settle_reload(None)
            if self._started is not None and not self._started.done():
                self._started.set_result(message)
        elif self._started is not None and not self._started.done():
            error = IccError(message.message, message.hint)
            error.exit_code = message.exit_code
            self._started.set_exception(error)
        else:
            log.error("the engine cannot be loaded again: %s", message.message)
            self._settle_reload(EngineFailed(503, message.message))

    def _settle_reload(self, error: EngineFailed | None) -> None:
        if self._reloaded is not None and not self._reloaded.done():
            self._reloaded.set_result(None) if error is None else self._reloaded.set_exception(error)

    def _answer(self, number: int, error: EngineFailed | None) -> bool:
        """Whether somebody has asked for that about an adapter, and is told now."""
        answer = self._asked.get(number)
        if answer is None:
            return False
        if not answer.done():
            answer.set_result(None) if error is None else answer.set_exception(error)
        return True

    def _take_report(self, report: Report) -> None:
        self.stats = report.stats
        self.adapters = report.adapters or self.adapters
        for delta in report.deltas:
            stream = self._streams.get(delta.id)
            if stream is not None:
                stream.push(delta)
        self.observe(report)


class _Pipe(asyncio.Protocol):
    """The HTTP process's end of the socket."""

    def __init__(self, receive: Callable[[bytes], None], lost: asyncio.Event) -> None:
        self._receive, self._lost = receive, lost
        self._frames = Frames()

    def data_received(self, data: bytes) -> None:
        for body in self._frames.feed(data):
            self._receive(body)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost.set()


def worker_command(options: LoadOptions, log_options: LogOptions) -> list[str]:
    """The command of the engine process. -P: nothing is imported from the current directory."""
    module = f"{__package__}.worker_main"
    return [sys.executable, "-P", "-m", module, "{fd}", options.to_json(), log_options.to_text()]

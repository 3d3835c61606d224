"""EngineClient: starts the engine process, communicates with it, and restarts it when it dies or hangs."""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import msgspec

from ...errors import IccError
from ...options import LoadOptions
from ...parent import deaf_to_signals
from ..log import LogOptions, with_fields
from .engine_stream import EngineFailed, EngineStream, SentPrompt, fail_all
from .frames import Frames
from .messages import (
    AdapterDone,
    AdapterStats,
    Cancel,
    DropKV,
    Embedded,
    Failed,
    FromEngine,
    KVChanged,
    KVGiven,
    KVTaken,
    LoadAdapter,
    PromptLogprobs,
    Ready,
    Report,
    Stats,
    TakeKV,
    UnloadAdapter,
    WatchKV,
    Working,
)
from .messages import encode as encode_message
from .prompt_folder import PromptFolder
from .step_costs import StepCosts

log = logging.getLogger("icc.serve")
_RELOADING = "the engine is being loaded again"
_NOT_READY = "the engine is not ready"
_DRAIN_S = 0.02
_BACKOFF_S = (0.1, 30.0)  # first and longest wait before a restart of the engine
_SOCKET_BYTES = 4 << 20
_LONGEST_STEP = 30  # times `watchdog_s`: no step that ends takes as long


@dataclass(eq=False)
class _Reload:
    """A reload of the engine. replaces: whether the old process is being ended for it."""

    done: asyncio.Future[None]
    replaces: bool = False

    def settle(self, error: EngineFailed | None) -> None:
        """Set the result for the caller of `reload`; later calls do nothing."""
        if not self.done.done():
            self.done.set_result(None) if error is None else self.done.set_exception(error)


class EngineClient:
    """One engine process at a time, restarted after it has died or was killed because it hung.

    command: of the process; "{fd}" is replaced by the number of its socket's descriptor. watchdog_s: an engine hangs if
    it sends nothing for so many seconds, or nothing but Working for thirty times as many. number: of the replica. ids:
    gives the ids of requests about adapters, which must differ from those of prompts. loaded: the names of the adapters
    that the process has loaded.
    """

    def __init__(
        self, command: Sequence[str], watchdog_s: float = 10.0, number: int = 0, ids: Iterator[int] | None = None
    ) -> None:
        self.command, self.number = command, number
        self._watchdog_s = watchdog_s
        self._ids = count() if ids is None else ids
        self.observe: Callable[[Report], None] = lambda report: None  # called with every report
        self.on_ready: Callable[[], None] = lambda: None  # called when an engine process has loaded the engine
        # called with the unfinished prompts of a process that ended
        self.on_lost: Callable[[Sequence[SentPrompt], EngineFailed], None] = fail_all
        self.watch: WatchKV | None = None  # the first message to every process, if `on_kv` is used
        self.on_kv: Callable[[bytes | None], None] = lambda events: None  # prefix cache events; None: all is gone
        self._decoder = msgspec.msgpack.Decoder(FromEngine)
        self._transport: asyncio.Transport | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self.started_with: Sequence[str] = command  # the command of the running or last process
        self._prompts: dict[int, SentPrompt] = {}
        self._asked: dict[int, asyncio.Future[None]] = {}  # requests about adapters, by id
        self._lost = asyncio.Event()
        self._started: asyncio.Future[Ready] | None = None
        self._reload: _Reload | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._stopping = False
        self._heard = self._done = 0.0  # times of the last message, and of the last one other than Working
        self._identity: str | None = None  # of the first engine that was loaded, see Ready
        self.facts: Ready | None = None  # of the ready engine; None if none is ready
        self.stats, self.costs = Stats(), StepCosts()
        self.adapters: AdapterStats | None = None
        self.loaded: set[str] = set()
        self.restarts = 0

    @property
    def pid(self) -> int | None:
        """Process id of the engine; None before it is started."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Start the process and wait until it is loaded. IccError with its exit code if it cannot be."""
        self._started = asyncio.get_running_loop().create_future()
        self._supervisor = asyncio.create_task(self._supervise())
        await self._started

    async def stop(self) -> None:
        """End the process; open streams fail."""
        if self._supervisor is not None:
            self._stopping = True
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)
        await self._end_process("the server has stopped")

    @property
    def takes(self) -> bool:
        """Whether prompts may be sent: an engine is ready, and not about to be replaced."""
        return self._transport is not None and self.facts is not None and self._reload is None

    @property
    def open(self) -> Collection[SentPrompt]:
        """The prompts in the engine that have not ended."""
        return self._prompts.values()

    def send(self, prompt: SentPrompt) -> None:
        """Send a prompt to the engine. EngineFailed, status 503, if it `takes` none."""
        if self._transport is None or not self.takes:
            raise EngineFailed(503, _RELOADING if self._reload is not None else _NOT_READY)
        self._prompts[prompt.submit.id] = prompt
        self._transport.write(encode_message(prompt.submit))

    def tell(self, given: TakeKV | DropKV) -> None:
        """Tell the engine to take KV that another process publishes, or to stop that; does nothing if no process
        runs."""
        if self._transport is not None:
            self._transport.write(encode_message(given))

    async def ask(self, question: LoadAdapter | UnloadAdapter) -> None:
        """Have the engine load or unload an adapter; sets the id of `question`. EngineFailed if it cannot."""
        if self._transport is None or self.facts is None:
            raise EngineFailed(503, _NOT_READY)
        number = next(self._ids)
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        self._transport.write(encode_message(msgspec.structs.replace(question, id=number)))
        try:
            await answer
        finally:
            self._asked.pop(number, None)
        if isinstance(question, LoadAdapter):
            self.loaded.add(question.name)
        else:
            self.loaded.discard(question.name)

    async def reload(self, wait_s: float) -> None:
        """Load the engine again with `command`, in a new process; a process that is still loading is ended. Running
        requests have `wait_s` seconds to end and fail after that; new ones are refused meanwhile. EngineFailed if a
        reload is running already, no process runs, or the engine cannot be loaded; loading is then retried."""
        if self._reload is not None or self._process is None:
            raise EngineFailed(503, _RELOADING if self._reload else _NOT_READY)
        self._reload = reload = _Reload(asyncio.get_running_loop().create_future())
        try:
            end = time.monotonic() + wait_s
            while self._prompts and time.monotonic() < end:
                await asyncio.sleep(_DRAIN_S)
            if self._process is not None and not reload.done.done():  # else `_supervise` settles it
                reload.replaces = True
                self._lost.set()
            await reload.done
        finally:
            self._reload = None

    def close(self, stream: EngineStream) -> None:
        """Cancel the unfinished prompts of a stream that is no longer read."""
        for submit_id in stream.ids:
            if self._prompts.pop(submit_id, None) is not None and self._transport is not None:
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
            if self._stopping:  # wait_for of Python 3.11 loses a cancellation that comes together with its result
                return
            lost = len(self._prompts)
            if self._reload is not None and self._reload.replaces:
                self._reload.replaces = False
                await self._end_process(_RELOADING)
                continue
            await self._end_process(f"the engine {reason}")
            if self._reload is not None:
                self._reload.settle(EngineFailed(503, f"the engine {reason}"))
            if self._started is not None and not self._started.done():
                self._started.set_exception(IccError(f"the engine process {reason}"))
            if self._started is not None and self._started.exception() is not None:
                return  # the first load failed: the caller of `start` gets the error
            wait = _BACKOFF_S[0] if time.monotonic() - began > _BACKOFF_S[1] else min(wait * 2, _BACKOFF_S[1])
            fields = with_fields(replica=self.number, prompts_lost=lost, restart=self.restarts + 1, wait_s=wait)
            log.error("the engine %s, and is started again", reason, extra=fields)
            await asyncio.sleep(wait)
            self.restarts += 1

    async def _spawn(self) -> None:
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
        with theirs, deaf_to_signals():  # this process handles signals, drains, and then ends the engine
            command = [part.replace("{fd}", str(theirs.fileno())) for part in self.command]
            self.started_with = self.command
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        self._lost.clear()
        self._heard = self._done = time.monotonic()
        ours.setblocking(False)
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_unix_connection(lambda: _Pipe(self._receive, self._lost), sock=ours)
        # unsent bytes are bounded by admission, not by the transport
        self._transport.set_write_buffer_limits(high=1 << 30)
        if self.watch is not None:
            self._transport.write(encode_message(self.watch))

    async def _watch(self) -> str:
        """Wait until the process has died or hangs; returns which, as text."""
        interval = min(0.25, self._watchdog_s / 4)
        while True:
            begin = time.monotonic()
            try:
                await asyncio.wait_for(self._lost.wait(), interval)
                return "died"
            except TimeoutError:
                late = time.monotonic() - begin - interval
                if late > interval:  # this process was suspended itself, and has not read the engine's messages
                    self._heard, self._done = self._heard + late, self._done + late
                if self.facts is not None and (reason := self._hangs(time.monotonic())):
                    return reason

    def _hangs(self, now: float) -> str:
        """Why the engine counts as hanging, as text; "" if it does not. now: monotonic, in seconds."""
        if (silent := now - self._heard) > self._watchdog_s:
            return f"hangs: it has said nothing for {silent:.1f} s"
        if (busy := now - self._done) > self._watchdog_s * _LONGEST_STEP:
            return f"hangs: it has worked on one step for {busy:.1f} s"
        return ""

    async def _end_process(self, reason: str) -> None:
        self.facts = None
        self.stats, self.adapters = Stats(), None
        self.loaded.clear()
        lost, self._prompts = list(self._prompts.values()), {}
        self.on_kv(None)
        self.on_lost(lost, EngineFailed(503, reason, began=True))
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
        if isinstance(message, Working):
            return
        self._done = self._heard
        if isinstance(message, Report):
            self._take_report(message)
        elif isinstance(message, KVChanged):
            self.on_kv(message.events)
        elif isinstance(message, KVTaken):
            self.costs.taken.add(message.tokens, message.seconds)
        elif isinstance(message, AdapterDone):
            self._answer(message.id, None)
        elif isinstance(message, Failed):
            error = EngineFailed(message.status, message.message, message.field)
            if not self._answer(message.id, error) and (prompt := self._prompts.pop(message.id, None)) is not None:
                prompt.stream.fail(error)
        elif isinstance(message, PromptLogprobs | Embedded | KVGiven):
            if (prompt := self._prompts.get(message.id)) is not None:
                prompt.stream.add(message)
        elif isinstance(message, Ready):
            self._take_ready(message)
        elif self._started is not None and not self._started.done():
            error = IccError(message.message, message.hint)
            error.exit_code = message.exit_code
            self._started.set_exception(error)
        else:
            self._not_again(message.message)

    def _not_again(self, why: str) -> None:
        log.error("the engine cannot be loaded again: %s", why)
        if self._reload is not None and not self._reload.replaces:
            self._reload.settle(EngineFailed(503, why))

    def _take_ready(self, ready: Ready) -> None:
        if self._identity is None:
            self._identity = ready.identity
        elif ready.identity != self._identity:  # the engine in the directory was replaced
            self._not_again("another model, tokenizer or limits have replaced it: restart the server")
            self._lost.set()
            return
        self.facts = ready
        self.on_kv(None)
        fields = with_fields(replica=self.number, pid=self.pid, restarts=self.restarts, load_s=round(ready.load_s, 2))
        log.info("the engine is ready", extra=fields)
        self.on_ready()
        if self._reload is not None and not self._reload.replaces:
            self._reload.settle(None)
        if self._started is not None and not self._started.done():
            self._started.set_result(ready)

    def _answer(self, number: int, error: EngineFailed | None) -> bool:
        """Settle the request about an adapter with this id; returns False if there is none."""
        answer = self._asked.get(number)
        if answer is None:
            return False
        if not answer.done():
            answer.set_result(None) if error is None else answer.set_exception(error)
        return True

    def _take_report(self, report: Report) -> None:
        self.stats = report.stats
        self.adapters = report.adapters or self.adapters
        self.costs.add(report.step_tokens, report.step_s, report.stats.running)
        for delta in report.deltas:
            prompt = self._prompts.get(delta.id)
            if prompt is not None:
                prompt.stream.push(delta)
                if prompt.ended:
                    del self._prompts[delta.id]
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


def worker_command(options: LoadOptions, log_options: LogOptions, prompts: PromptFolder | None = None) -> list[str]:
    """The command of the engine process. prompts: the folder of kept prompts, None for none. -P: nothing is imported
    from the current directory."""
    module = f"{__package__}.worker_main"
    stored = [] if prompts is None else [prompts.to_json()]
    return [sys.executable, "-P", "-m", module, "{fd}", options.to_json(), log_options.to_text(), *stored]

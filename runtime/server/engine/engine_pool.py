"""EnginePool: the engine processes of a server, which are replicas of one engine, as if they were one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count

import msgspec

from .engine_client import EngineClient
from .engine_stream import EngineFailed, EngineStream, SentPrompt, fail_all
from .messages import AdapterStats, LoadAdapter, Ready, Stats, Submit, UnloadAdapter
from .router import ReplicaLoad, Router, prefix_keys

_MOST_RUNS = 2  # of a prompt: one that ends its engine must not end all


class EnginePool:
    """Sends each prompt to the replica that a Router chooses.

    commands: a process for each replica, see EngineClient. tokens: how many a replica's KV cache holds at most.
    """

    def __init__(self, commands: Sequence[Sequence[str]], watchdog_s: float = 10.0, tokens: int = 1 << 20) -> None:
        self._ids = count()
        self._tokens = tokens
        self._router = Router(len(commands))
        self.replicas = [EngineClient(command, watchdog_s, n, self._ids) for n, command in enumerate(commands)]
        self.on_ready: Callable[[], None] = lambda: None  # called when a replica has loaded the engine
        for replica in self.replicas:
            replica.on_ready = lambda: self.on_ready()
            replica.on_lost = partial(self._lost, replica.number)
        self._reloading = False

    # -- all of them together ----------------------------------------------------------------------------------------

    @property
    def ready(self) -> list[Ready]:
        """The facts of the replicas that are ready."""
        return [replica.facts for replica in self.replicas if replica.facts is not None]

    @property
    def stats(self) -> Stats:
        """Gauges and counters of the processes that run, summed."""
        return total([replica.stats for replica in self.replicas])

    @property
    def adapters(self) -> AdapterStats | None:
        """Adapters that are in memory anywhere, or waited for; None for an engine without room for any."""
        found = [replica.adapters for replica in self.replicas if replica.adapters is not None]
        if not found:
            return None
        resident, awaited = ([name for one in found for name in getattr(one, kind)] for kind in ("resident", "awaited"))
        slots = max(one.slots for one in found)
        return AdapterStats(slots, list(dict.fromkeys(resident)), list(dict.fromkeys(awaited)))

    async def start(self) -> None:
        """Start the processes, one after the other, and wait until they are loaded. IccError with its exit code if one
        cannot be."""
        for replica in self.replicas:
            await replica.start()

    async def stop(self) -> None:
        """End the processes; streams that are open fail."""
        for replica in self.replicas:
            replica.on_lost = fail_all
        await asyncio.gather(*(replica.stop() for replica in self.replicas))

    async def ask(self, question: LoadAdapter | UnloadAdapter) -> None:
        """Have all that are ready do something about an adapter. EngineFailed where one cannot, or none is ready."""
        asked = [replica.ask(question) for replica in self.replicas if replica.facts is not None]
        if not asked:
            raise EngineFailed(503, "the engine is not ready")
        for found in await asyncio.gather(*asked, return_exceptions=True):
            if isinstance(found, BaseException):
                raise found

    async def reload(self, wait_s: float, commands: Sequence[Sequence[str]]) -> None:
        """Load the engine that is behind `commands`, one replica after the other, while the others answer.

        Prompts that run on a replica have `wait_s` seconds to end; what has begun fails after that. A replica that is
        being started again is left to that. EngineFailed where a reload is under way, none is ready, or a process
        cannot load the engine: then all go back to the commands that they had.
        """
        if self._reloading or not self.ready:
            raise EngineFailed(503, "the engine is loaded anew already" if self._reloading else "no engine is ready")
        self._reloading, before = True, [replica.command for replica in self.replicas]
        changed: list[EngineClient] = []
        try:
            self._have(commands)
            for replica in self.replicas:
                if replica.facts is not None:
                    await replica.reload(wait_s)
                    changed.append(replica)
        except BaseException:
            self._have(before)
            for replica in changed if list(commands) != before else ():
                with contextlib.suppress(EngineFailed):  # the error that there was is told
                    await replica.reload(wait_s)
            raise
        finally:
            self._reloading = False

    def _have(self, commands: Sequence[Sequence[str]]) -> None:
        """What processes are started with from now on."""
        for replica, command in zip(self.replicas, commands, strict=True):
            replica.command = command

    # -- one request -------------------------------------------------------------------------------------------------

    def submit(self, submits: Sequence[Submit]) -> EngineStream:
        """Send the prompts of one request (their ids are given here), each where it is computed the soonest.
        EngineFailed, status 503, if no replica takes any."""
        named = [msgspec.structs.replace(submit, id=next(self._ids)) for submit in submits]
        stream = EngineStream(named)
        for submit in named:
            self._send(SentPrompt(stream, submit))
        return stream

    def close(self, stream: EngineStream) -> None:
        """Nobody reads the stream any more: what is not finished of it is cancelled."""
        for replica in self.replicas:
            replica.close(stream)

    def _send(self, prompt: SentPrompt) -> None:
        takers = [replica for replica in self.replicas if replica.takes]
        if len(self.replicas) == 1 or not takers:
            return self.replicas[0].send(prompt)  # which says why it does not
        keys, length = prefix_keys(prompt.submit), len(prompt.submit.prompt)
        loads = [_load(replica, prompt.submit.adapter) for replica in takers]
        best, prompt.cost = self._router.choose(keys, length, loads)
        prompt.runs += 1
        self.replicas[best.replica].send(prompt)
        self._router.ran(best.replica, keys, self._tokens)

    def _lost(self, number: int, prompts: Sequence[SentPrompt], error: EngineFailed) -> None:
        """A replica has ended: what it has said nothing of runs elsewhere, what had begun fails."""
        self._router.forget(number)
        for prompt in prompts:
            elsewhere = any(replica.takes for replica in self.replicas if replica.number != number)
            if prompt.begun or prompt.runs >= _MOST_RUNS or not elsewhere:
                prompt.stream.fail(error)
            else:
                self._send(prompt)


def _load(replica: EngineClient, adapter: str) -> ReplicaLoad:
    waiting = sum(prompt.cost for prompt in replica.open if not prompt.begun)
    sequences = sum(prompt.stream.left[prompt.submit.id] for prompt in replica.open)
    slots, blocks = (replica.facts.max_batch_size, replica.facts.num_blocks) if replica.facts else (1, 1)
    known = replica.adapters.resident if replica.adapters else ()
    usage = replica.stats.blocks_used / max(blocks, 1)
    return ReplicaLoad(replica.number, waiting, sequences, slots, usage, not adapter or adapter in known)


def total(stats: Sequence[Stats]) -> Stats:
    """Gauges and counters, summed."""
    return Stats(*(sum(getattr(one, name) for one in stats) for name in Stats.__struct_fields__))

"""EnginePool: the engine processes of a server, replicas of one engine, used like a single one."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import count

import msgspec

from ...errors import UsageError
from ...format.adapters import AdapterRoom
from .engine_client import EngineClient
from .engine_stream import EngineFailed, EngineStream, SentPrompt, fail_all
from .handover import Handover
from .kv_exchange import shared
from .kv_gifts import KVGifts
from .messages import AdapterStats, LoadAdapter, Ready, Stats, Submit, UnloadAdapter, WatchKV
from .router import ReplicaLoad, Router, prefix_keys
from .step_costs import Costs, place

_MOST_RUNS = 2  # runs of a prompt: one that crashes its engine must not crash all


class EnginePool:
    """Sends each prompt to the replica that a Router chooses.

    commands: of each replica's process, see EngineClient. tokens: the capacity of a replica's KV cache. prefills: how
    many of the replicas, the first ones, also compute prompts for the others when that is faster, see `place`.
    moves_kv: the command-line option that needs KV to move between processes; "" for none.
    """

    def __init__(
        self,
        commands: Sequence[Sequence[str]],
        watchdog_s: float = 10.0,
        tokens: int = 1 << 20,
        prefills: int = 0,
        moves_kv: str = "",
    ) -> None:
        self._ids = count()
        self.tokens, self._prefills = tokens, prefills
        self._moves_kv = "--prefill-replicas" if prefills else moves_kv
        self._handovers: dict[int, Handover] = {}  # by prompt id
        self._router, self.gifts = Router(), KVGifts()
        self.replicas = [EngineClient(command, watchdog_s, n, self._ids) for n, command in enumerate(commands)]
        # called with a replica when it has loaded the engine
        self.on_ready: Callable[[EngineClient], None] = lambda replica: None
        self.on_replaced: Callable[[EngineClient], Awaitable[object]] = _nothing  # awaited before the next one
        for replica in self.replicas:
            replica.on_ready = partial(self._ready, replica)
            replica.on_lost = partial(self._lost, replica.number)
        self._reloading = False

    # -- all replicas ------------------------------------------------------------------------------------------------

    @property
    def block_tokens(self) -> int:
        """The number of tokens by which cached prefixes grow; 1 while no replica is ready."""
        return next((facts.prefix_blocks[0] for facts in self.ready), 1)

    @property
    def _capacity(self) -> int:
        """How many tokens the prefix cache of a replica can hold."""
        return next(
            (unit * count for unit, count in (facts.prefix_blocks for facts in self.ready) if count), self.tokens
        )

    @property
    def ready(self) -> list[Ready]:
        """The facts of the replicas that are ready."""
        return [replica.facts for replica in self.replicas if replica.facts is not None]

    @property
    def stats(self) -> Stats:
        """Gauges and counters, summed over the running processes."""
        return total([replica.stats for replica in self.replicas])

    @property
    def adapters(self) -> AdapterStats | None:
        """Adapters that are in memory of any replica, or waited for; None for an engine that holds no adapters."""
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
        if self._moves_kv and not all(facts.moves_kv for facts in self.ready):
            raise UsageError(
                f"{self._moves_kv}: the KV of this engine cannot go from one process to another",
                "it can on CPUs, of engines of one rank that generate, without --kv-policy",
            )

    async def stop(self) -> None:
        """End the processes; open streams fail."""
        for replica in self.replicas:
            replica.on_lost = fail_all
        await asyncio.gather(*(replica.stop() for replica in self.replicas))

    async def ask(self, question: LoadAdapter | UnloadAdapter) -> None:
        """Have all replicas that are ready, or become ready meanwhile, load or unload an adapter. EngineFailed if one
        cannot, or none is ready. A replica that dies meanwhile is not asked again here; `on_ready` is called when it is
        back."""
        done, failed = False, EngineFailed(503, "the engine is not ready")
        asked: set[int | None] = set()
        while new := [one for one in self.replicas if one.facts is not None and one.pid not in asked]:
            asked.update(one.pid for one in new)
            for found in await asyncio.gather(*(one.ask(question) for one in new), return_exceptions=True):
                if isinstance(found, EngineFailed) and found.status == 503:
                    failed = found
                elif isinstance(found, BaseException):
                    raise found
                else:
                    done = True
        if not done:
            raise failed

    @property
    def room(self) -> AdapterRoom | None:
        """Which adapters fit the engine; None if it holds none, or no replica is ready."""
        return next((facts.adapters for facts in self.ready), None)

    def has_adapter(self, name: str) -> bool:
        """Whether a replica that takes prompts has loaded an adapter."""
        return any(replica.takes and name in replica.loaded for replica in self.replicas)

    def _ready(self, replica: EngineClient) -> None:
        self.on_ready(replica)

    def watch_kv(self, plain: Sequence[bytes], publish: Callable[[int, bytes | None], None]) -> None:
        """Publish the changes of the prefix caches. Call it before `start`. publish: called with a replica's number and
        its events in the form of `kv_wire`; None: its cache is empty. plain: see WatchKV."""
        for replica in self.replicas:
            replica.watch, replica.on_kv = WatchKV(list(plain)), partial(publish, replica.number)

    async def reload(self, wait_s: float, commands: Sequence[Sequence[str]]) -> None:
        """Load the engine of `commands`, one replica after the other, while the others answer.

        Prompts that run on a replica have `wait_s` seconds to end; those that have begun fail after that. A replica
        whose process has ended is started with the new command in its turn. EngineFailed if a reload is running, no
        replica is ready, or a process cannot load the engine: then all return to their old commands.
        """
        if self._reloading or not self.ready:
            raise EngineFailed(503, "the engine is being reloaded already" if self._reloading else "no engine is ready")
        self._reloading, before = True, [replica.command for replica in self.replicas]
        try:
            for replica, command in zip(self.replicas, commands, strict=True):
                replica.command = command
                if replica.pid is not None:
                    await replica.reload(wait_s)
                    await self.on_replaced(replica)
        except BaseException:
            await self._go_back(before, wait_s)
            raise
        finally:
            self._reloading = False

    async def _go_back(self, commands: Sequence[Sequence[str]], wait_s: float) -> None:
        """Return every replica to its old command, also one that is still starting with the new one."""
        for replica, command in zip(self.replicas, commands, strict=True):
            replica.command = command
        for replica in self.replicas:
            if replica.pid is not None and replica.started_with != replica.command:
                with contextlib.suppress(EngineFailed):  # the first error is raised instead
                    await replica.reload(wait_s)

    # -- one request -------------------------------------------------------------------------------------------------

    def submit(self, submits: Sequence[Submit], whole: bool = False) -> EngineStream:
        """Send the prompts of one request, each to the replica that will compute it soonest; sets their ids. whole: see
        EngineStream. EngineFailed, status 503, if no replica takes any."""
        named = [msgspec.structs.replace(submit, id=next(self._ids)) for submit in submits]
        stream = EngineStream(named, whole)
        stream.on_given = lambda given: self.gifts.grow(given.name, given.nbytes)
        for submit in named:
            self._send(SentPrompt(stream, submit))
        for name in {submit.kv_name for submit in named} - {""}:
            self.gifts.begin(name)
        return stream

    def close(self, stream: EngineStream) -> None:
        """Cancel the unfinished prompts of a stream that is no longer read."""
        for submit in stream.submits:
            self.gifts.end(submit.kv_name)
        handed = [found for number in stream.ids if (found := self._handovers.pop(number, None)) is not None]
        for replica in self.replicas:
            for one in (stream, *handed):
                replica.close(one)
        for handover in handed:
            handover.drop()

    def _send(self, prompt: SentPrompt) -> None:
        adapter, takers = prompt.submit.adapter, self._takers(prompt.submit)
        if not takers and any(replica.takes for replica in self.replicas):
            raise EngineFailed(503, f"the adapter {adapter!r} is not loaded now: ask again")
        if len(self.replicas) == 1 or not takers:
            return self.replicas[0].send(prompt)  # it raises the reason
        length, keys = len(prompt.submit.prompt), prefix_keys(prompt.submit)
        ranked = self._router.ranked(keys, length, [self._load(replica, adapter) for replica in takers])
        measured, costs, now = [one.costs for one in self.replicas], None, time.monotonic()
        if self._prefills and prompt.runs == 0 and shared(prompt.submit):
            facts = self.ready[0]
            costs = Costs.of(measured, facts.prefix_blocks[0], facts.step_tokens)
        placed = place(ranked, costs, measured, self._prefills, now)
        prompt.runs += 1
        answers = self.replicas[placed.answers]
        answers.costs.arrive(now)
        if placed.computes is None:
            prompt.cost = placed.tokens
            answers.send(prompt)
        else:
            handover = self._handovers[prompt.submit.id] = Handover(next(self._ids), prompt, answers, self._handed)
            self.replicas[placed.computes].send(SentPrompt(handover, handover.submits[0], placed.tokens))
            self._router.ran(placed.computes, keys, self._capacity)
        self._router.ran(placed.answers, keys, self._capacity)

    def _takers(self, submit: Submit) -> list[EngineClient]:
        """The replicas that take a prompt and have its adapter, which a restarted one may not have loaded yet. Replicas
        that compute prompts for others come last."""
        order = [*self.replicas[self._prefills :], *self.replicas[: self._prefills]]
        return [one for one in order if one.takes and (not submit.adapter or submit.adapter in one.loaded)]

    def _handed(self, handover: Handover, whole: bool) -> None:
        """Called when a prompt has been computed (`whole`), or its replica has failed: the answering replica computes
        the rest."""
        prompt = handover.prompt
        if self._handovers.pop(prompt.submit.id, None) is None:
            return  # it was closed
        prompt.submit = handover.submit
        prompt.runs -= whole
        try:
            if handover.target_stays:
                prompt.runs, prompt.cost = prompt.runs + 1, self.ready[0].prefix_blocks[0]
                handover.target.send(prompt)
            else:
                self._send(prompt)
        except EngineFailed as error:
            prompt.stream.fail(error)

    def _lost(self, number: int, prompts: Sequence[SentPrompt], error: EngineFailed) -> None:
        """Called when a replica has ended: prompts without output run elsewhere, the others fail."""
        self._router.forget(number)
        for prompt in prompts:
            if isinstance(prompt.stream, Handover):
                prompt.stream.fail(error)
                continue
            elsewhere = any(replica.number != number for replica in self._takers(prompt.submit))
            if (prompt.begun and not prompt.stream.whole) or prompt.runs >= _MOST_RUNS or not elsewhere:
                prompt.stream.fail(error)
            else:
                prompt.stream.begin_again(prompt.submit)
                self._send(prompt)

    def _load(self, replica: EngineClient, adapter: str) -> ReplicaLoad:
        waiting = sum(prompt.cost for prompt in replica.open if not prompt.begun)
        sequences = sum(prompt.stream.left[prompt.submit.id] for prompt in replica.open)
        sequences += sum(handover.target is replica for handover in self._handovers.values())
        slots, blocks = (replica.facts.max_batch_size, replica.facts.num_blocks) if replica.facts else (1, 1)
        usage = replica.stats.blocks_used / max(blocks, 1)
        decoding = sum(prompt.stream.left[prompt.submit.id] for prompt in replica.open if prompt.begun)
        has = not adapter or _has(replica, adapter)
        return ReplicaLoad(replica.number, waiting, sequences, slots, usage, has, decoding)


async def _nothing(replica: EngineClient) -> None:
    """The default of `on_replaced`."""


def _has(replica: EngineClient, adapter: str) -> bool:
    """Whether an adapter is in a slot, or is being loaded for an earlier prompt."""
    told = replica.adapters
    in_slot = told is not None and (adapter in told.resident or adapter in told.awaited)
    return in_slot or any(prompt.submit.adapter == adapter for prompt in replica.open)


def total(stats: Sequence[Stats]) -> Stats:
    """The sum of gauges and counters."""
    return Stats(*(sum(getattr(one, name) for one in stats) for name in Stats.__struct_fields__))

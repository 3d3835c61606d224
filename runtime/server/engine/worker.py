"""Worker: the engine loop in its own process, driven by messages."""

from __future__ import annotations

import logging
import time

from ...errors import CapacityError, IccError, RequestError
from ...executor.base import ranks
from ...kv.sequence import CachedSequence
from ...llm import LLM
from ...loop.driver import LoopDriver, TaskListener
from ...prefixes.kept import KeptPrompts
from ...requests.generation import Generation
from ...requests.prompt_logprobs import PromptScores
from ...requests.request import Output
from ...requests.sampler import Constrain
from ...requests.scores import NotFinite
from .adapter_table import AdapterTable
from .channel import Channel, ChannelClosed
from .identity import identity_of
from .kv_exchange import KVExchange
from .kv_transfer import KVTransfer, sequence_of
from .kv_wire import KVWire
from .messages import (
    HEARTBEAT_S,
    Cancel,
    Delta,
    DropKV,
    Embedded,
    Failed,
    KVChanged,
    PromptLogprobs,
    Ready,
    Report,
    Stats,
    Submit,
    TakeKV,
    ToEngine,
    WatchKV,
)
from .prompts import Prompt, PromptStage, PromptTable
from .pulse import Pulse, cpu_clocks

log = logging.getLogger("icc.engine")
_INTAKE = 16  # prompts started per step, so that a burst of them does not delay a step
_FAILED = "the request failed inside the engine"
_CHECK_S = 5.0  # an idle engine checks its KV bookkeeping at most this often


class GrammarService:
    """Compiles grammars beside the steps. This base class refuses all grammars."""

    def request(self, submit: Submit) -> None:
        """Begin to compile the grammar of a request. RequestError if the engine cannot follow grammars."""
        raise RequestError("this engine cannot follow a grammar", "it has no tokenizer", field="response_format")

    def finished(self) -> list[tuple[Submit, Constrain | IccError]]:
        """The grammars compiled since the last call, or the errors, with their requests."""
        return []


def _log_fault(error: Exception) -> None:
    """Log what failed in a step: a lost rank or device in a line, which says all, anything else with its traceback."""
    if isinstance(error, IccError):
        log.error("a step failed: %s", error.message)
    else:
        log.error("a step failed", exc_info=error)


class Worker(TaskListener[Prompt]):
    """Takes prompts from the channel, runs steps, and reports each step in one message."""

    def __init__(
        self,
        llm: LLM,
        channel: Channel,
        grammars: GrammarService | None = None,
        kept: KeptPrompts | None = None,
    ) -> None:
        self._driver = LoopDriver(llm.loop, self, llm.adapters)
        self._adapters, self._ranks = AdapterTable(llm.adapters), ranks(llm.executor)
        llm.loop.on_fault = _log_fault
        self._channel = channel
        self._grammars = grammars or GrammarService()
        self._embeds, self._identity = llm.manifest.embedding is not None, identity_of(llm.manifest)
        self.prompts = PromptTable(self._embeds)
        self._deltas: list[Delta] = []  # not reported yet
        self._steps = self._prompt_tokens = self._cached_tokens = self._output_tokens = self._healed = 0
        self._checked = self._reported = self._swept = 0.0
        self._kv_wire: KVWire | None = None
        self._kv = KVExchange(KVTransfer.of(llm), llm.loop, channel)
        self._kept = kept or KeptPrompts(lambda: llm.loop.scheduler.kv, llm.manifest.limits.max_seq_len)

    def run(self, load_s: float = 0.0) -> None:
        """Serve until the HTTP process has ended."""
        executor, prefix_blocks = self._driver.loop.executor, self._driver.loop.scheduler.kv.prefix_blocks
        blocks = sum(group.num_blocks for group in executor.groups)
        limits = executor.max_batch_size, executor.max_step_tokens
        room = None if self._driver.adapters is None else self._driver.adapters.plan.room
        facts = Ready(blocks, limits[0], load_s, prefix_blocks, self._kv.works, limits[1], self._identity, room)
        self._channel.send(facts)
        clocks = cpu_clocks(() if self._ranks is None else self._ranks.pids)
        on_cpu = self._driver.loop.manifest.backend == "cpu"
        pulse = Pulse(self._channel, clocks, self._halted) if on_cpu else None
        try:
            while True:
                self._turn()
        except ChannelClosed:
            return
        finally:
            if pulse is not None:
                pulse.stop()

    def _turn(self) -> None:
        """Handle messages, then run a step; without work, wait for messages and send a heartbeat."""
        self._check_ranks()
        busy = self._driver.has_work() or self.prompts.count(PromptStage.ARRIVED)
        soon = self.prompts.count(PromptStage.COMPILING) or self._adapters.busy or self._kept.busy
        wait = 0.0 if busy else 0.005 if soon else HEARTBEAT_S
        for message in self._channel.receive(wait):
            self._hear(message)
        for answer in self._adapters.answers():
            self._channel.send(answer)
        self._expire()
        self._take_grammars()
        for prompt in self.prompts.arrived(_INTAKE):
            self._take_up(prompt)
        if self._driver.has_work():
            self._step()
        elif self._deltas:
            self._report()
        elif time.monotonic() - self._reported >= HEARTBEAT_S:
            self._check()
            self._report()
        self._kv.give()
        self._kept.turn()
        if (now := time.monotonic()) - self._swept >= _CHECK_S:
            self._swept = now
            self._kv.sweep()

    def _check_ranks(self) -> None:
        """End the process if a rank has ended, even without requests. No request is to blame: the server restarts
        prompts without output, and fails the others."""
        if self._ranks is not None and self._ranks.lost:
            log.error("%s: the engine ends", self._ranks.lost)
            raise SystemExit(1)

    def _halted(self) -> bool:
        """Whether a rank is suspended, so that all threads that wait for it are blocked. The engine then sends no
        heartbeat, and the server ends it after the watchdog's time, unless the rank continues."""
        return self._ranks is not None and self._ranks.halted

    def _hear(self, message: ToEngine) -> None:
        if isinstance(message, Submit):
            self.prompts.arrive(message, time.monotonic())
        elif isinstance(message, WatchKV):
            self._driver.loop.watch_kv()
            self._kv_wire = KVWire(self._driver.loop.executor.groups, message.plain, self._adapter_name)
        elif isinstance(message, TakeKV):
            self._kv.take(message)
        elif isinstance(message, DropKV):
            self._kv.drop(message.name)
        elif not isinstance(message, Cancel):
            self._adapters.ask(message)
        elif (prompt := self.prompts.find(message.id)) is not None:
            self._end(prompt, "abort")

    # -- prompts -----------------------------------------------------------------------------------------------------

    def _take_up(self, prompt: Prompt) -> None:
        if self._embeds or not prompt.query.grammar:
            self._submit(prompt)
            return
        try:
            self._grammars.request(prompt.submit)
        except IccError as error:
            self._refuse(prompt, error)
        else:
            self.prompts.compile(prompt)

    def _take_grammars(self) -> None:
        for submit, result in self._grammars.finished():
            prompt = self.prompts.find(submit.id)
            if prompt is None:
                continue  # cancelled meanwhile
            if isinstance(result, IccError):
                self._refuse(prompt, result)
            else:
                prompt.constrain = result
                self._submit(prompt)

    def _submit(self, prompt: Prompt) -> None:
        """Run a prompt, or first read the stored KV of its prefix."""
        sequence = self._sequence(prompt)
        if sequence is not None and self._kept.fetch(sequence, lambda: self._go_on(prompt)):
            if prompt.stage is PromptStage.ARRIVED:
                self.prompts.compile(prompt)
            return
        self._start(prompt, sequence)

    def _go_on(self, prompt: Prompt) -> None:
        if prompt.stage is PromptStage.COMPILING:  # else it was cancelled meanwhile
            self._start(prompt, self._sequence(prompt))

    def _sequence(self, prompt: Prompt) -> CachedSequence | None:
        """A prompt as a sequence of the prefix cache; None if its KV cannot be kept."""
        driver = self._driver
        try:
            return sequence_of(prompt.submit, driver.loop.requests.shared_length, driver.adapters)
        except RequestError:
            return None  # `_start` will refuse it

    def _start(self, prompt: Prompt, sequence: CachedSequence | None) -> None:
        if sequence is not None:
            self._kept.use(sequence)
            for length, seconds in prompt.submit.keep:
                self._kept.keep(sequence, length, seconds)
        self.prompts.run(prompt)
        self._kv.begin(prompt)
        try:
            self._driver.submit(prompt)
        except Exception as error:
            self._refuse(prompt, error)
        else:
            self._prompt_tokens += len(prompt.requests[0].prompt if prompt.requests else prompt.query.token_ids)

    def _refuse(self, prompt: Prompt, error: Exception) -> None:
        """End a prompt and send the reason."""
        self._check_ranks()
        self.prompts.end(prompt)
        self._kv.drop(prompt.submit.takes_kv)
        if not isinstance(error, IccError):
            log.error("a request failed", exc_info=error)
        status = 400 if isinstance(error, RequestError | CapacityError) else 500
        message = error.message if isinstance(error, IccError) else _FAILED
        self._channel.send(Failed(prompt.id, status, message, error.field if isinstance(error, RequestError) else ""))

    def _expire(self) -> None:
        """End prompts past their deadline, in any stage."""
        for prompt in self.prompts.late(time.monotonic()):
            if prompt.generations:
                self._driver.abort(prompt, "deadline")
                self.outputs(prompt)
            else:
                self._end(prompt, "deadline")
                self._deltas += [Delta(prompt.id, n, reason="deadline") for n in range(prompt.submit.params.n)]
        if self._deltas:
            self._report()

    def _end(self, prompt: Prompt, reason: str) -> None:
        """End a prompt, in any stage, and all that runs for it."""
        self._driver.abort(prompt, reason)
        self.prompts.end(prompt)
        self._kv.drop(prompt.submit.takes_kv)

    # -- output ------------------------------------------------------------------------------------------------------

    def outputs(self, task: Prompt) -> None:
        ended, deltas = False, self._deltas
        for generation in task.generations:
            while generation.outputs:
                deltas.append(delta := self._delta(task, generation, generation.outputs.popleft()))
                ended = ended or delta.reason is not None
        if ended and task.done:
            self._kv.give()  # its last KV, before it is marked as ended
            self.prompts.end(task)

    def read(self, task: Prompt) -> None:
        if isinstance(task.reading, PromptScores):
            self._channel.send(PromptLogprobs(task.id, tuple(task.reading.logprobs)))
            return
        assert task.reading is not None and task.vector is not None
        scores = task.reading.scores
        cached = scores.num_cached_tokens or 0
        self._cached_tokens += cached
        self._channel.send(Embedded(task.id, task.vector.astype("<f4").tobytes()))
        self._deltas.append(Delta(task.id, 0, cached=cached, queued_s=scores.queued_s, reason="stop"))
        self.prompts.end(task)

    def failed(self, task: Prompt, error: Exception) -> None:
        fault = error if isinstance(error, NotFinite | RequestError | CapacityError) else None
        if fault is not None:
            self._refuse(task, fault)
            return
        self._check_ranks()
        self.prompts.end(task)  # the error was logged as a fault
        self._channel.send(Failed(task.id, 500, _FAILED))

    def lost(self, task: Prompt, error: Exception) -> None:
        self.outputs(task)

    def _step(self) -> None:
        start = time.perf_counter()
        try:
            self._driver.step()
        except Exception as error:  # the device has failed for good: the process ends and is restarted
            # no request is to blame: the server restarts prompts without output, and fails the others
            self._deltas = [delta for delta in self._deltas if delta.reason != "error"]
            self._report(time.perf_counter() - start)
            raise SystemExit(1) from error
        self._steps += 1
        self._report(time.perf_counter() - start)

    def _report(self, seconds: float = 0.0) -> None:
        """Send the deltas since the last report. seconds: of the step, 0 without a step."""
        if not self._deltas and self._halted():
            return
        deltas, self._deltas = self._deltas, []
        tokens = self._driver.loop.last_step_tokens if seconds else 0
        adapters = self._adapters.stats(self._driver.awaited)
        if self._kv_wire is not None and (events := self._driver.loop.take_kv_events()):
            self._channel.send(KVChanged(self._kv_wire.encode(events)))
        self._channel.send(Report(deltas, self._stats(), tokens, seconds, adapters))
        self._reported = time.monotonic()

    def _adapter_name(self, key: bytes) -> str:
        return key.hex() if self._driver.adapters is None else self._driver.adapters.told_as(key)

    def _delta(self, prompt: Prompt, generation: Generation, output: Output) -> Delta:
        cached = None
        if output.token_id is not None:
            self._output_tokens += 1
        if generation.index not in prompt.begun:
            prompt.begun.add(generation.index)
            cached = generation.num_cached_tokens or 0
            if generation.index == 0:
                self._cached_tokens += cached
        return Delta(
            prompt.id,
            generation.index,
            () if output.token_id is None else (output.token_id,),
            output.text,
            () if output.logprob is None else (output.logprob,),
            cached,
            generation.queued_s,
            output.finish_reason,
            output.stop,
            output.score,
        )

    def _stats(self) -> Stats:
        scheduler = self._driver.loop.scheduler
        pools = [group.pool for group in scheduler.kv.groups]
        not_taken_up = self.prompts.count(PromptStage.ARRIVED) + self.prompts.count(PromptStage.COMPILING)
        return Stats(
            scheduler.num_running,
            scheduler.num_waiting + not_taken_up,
            sum(pool.num_used for pool in pools),
            sum(pool.num_cached for pool in pools),
            scheduler.num_preemptions,
            scheduler.num_swaps,
            self._steps,
            self._prompt_tokens,
            self._cached_tokens,
            self._output_tokens,
            self._healed,
            self._kept.num_kept,
        )

    def _check(self) -> None:
        """Called when nothing runs: every block must be free or cached. If the bookkeeping is wrong, it is reset and
        counted."""
        now = time.monotonic()
        if now - self._checked < _CHECK_S:
            return
        self._checked = now
        self._kept.sweep()
        try:
            self._driver.loop.scheduler.check()
            assert self._driver.loop.scheduler.kv.is_idle, "blocks are lost"
        except AssertionError as error:
            log.error("the KV bookkeeping was wrong (%s) and is reset", error)
            self._healed += 1
            self._driver.loop.reset()

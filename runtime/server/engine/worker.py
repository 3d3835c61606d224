"""Worker: the engine loop in a process of its own, driven by messages."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial

import msgspec

from ...errors import CapacityError, IccError, RequestError
from ...llm import LLM
from ...requests.prompt_logprobs import PromptScores
from ...requests.request import Output
from ...requests.sampler import Constrain
from ...requests.scores import NotFinite
from .channel import Channel, ChannelClosed
from .messages import HEARTBEAT_S, Delta, Embedded, Failed, PromptLogprobs, Ready, Report, Stats, Submit
from .prompts import Prompt, PromptStage, PromptTable, RunningCompletion

log = logging.getLogger("icc.engine")
_INTAKE = 16  # prompts taken up per step while others run, so that a burst of them does not delay a step
_FAILED = "the request failed inside the engine"
_CHECK_S = 5.0  # an idle engine checks its KV bookkeeping at most this often


class GrammarService:
    """Compiles grammars beside the steps. This one knows none."""

    def request(self, submit: Submit) -> None:
        raise RequestError("this engine cannot follow a grammar", "it has no tokenizer", field="response_format")

    def finished(self) -> list[tuple[Submit, Constrain | IccError]]:
        """What has been compiled since the last call."""
        return []


class Worker:
    """Takes prompts from the channel, runs steps, and reports each step in one message."""

    def __init__(self, llm: LLM, channel: Channel, grammars: GrammarService | None = None) -> None:
        self._loop = llm.loop
        self._loop.on_fault = lambda error: log.error("a step failed", exc_info=error)
        self._channel = channel
        self._grammars = grammars or GrammarService()
        self.prompts = PromptTable()
        self._embeds = llm.manifest.embedding is not None
        self._steps = self._prompt_tokens = self._cached_tokens = self._output_tokens = self._healed = 0
        self._checked = self._reported = 0.0

    def run(self, load_s: float = 0.0) -> None:
        """Serve until the HTTP process has gone."""
        executor = self._loop.executor
        self._channel.send(Ready(sum(group.num_blocks for group in executor.groups), executor.max_batch_size, load_s))
        try:
            while True:
                self._turn()
        except ChannelClosed:
            return

    def _turn(self) -> None:
        """Messages, then a step; an idle turn waits for messages and says that the engine lives."""
        busy = self._loop.has_work() or self.prompts.count(PromptStage.ARRIVED)
        wait = 0.0 if busy else 0.005 if self.prompts.count(PromptStage.COMPILING) else HEARTBEAT_S
        for message in self._channel.receive(wait):
            if isinstance(message, Submit):
                self.prompts.arrive(message, time.monotonic())
            elif (prompt := self.prompts.find(message.id)) is not None:
                self._end(prompt, "abort")
        self._expire()
        self._take_grammars()
        for prompt in self.prompts.arrived(_INTAKE):
            self._answer_errors(prompt, partial(self._take_up, prompt))
        if self._loop.has_work():
            self._step()
        elif time.monotonic() - self._reported >= HEARTBEAT_S:
            self._check()
            self._report([], 0.0)

    # -- prompts -----------------------------------------------------------------------------------------------------

    def _take_up(self, prompt: Prompt) -> None:
        submit = prompt.submit
        if self._embeds:
            self.prompts.read(prompt, self._loop.add_embedding(submit.prompt, submit.skipped, submit.standing))
            self._prompt_tokens += len(submit.prompt)
        elif submit.prompt_logprobs is not None:  # they come before its completions
            scores = self._loop.add_score(submit.prompt, msgspec.structs.replace(submit.standing, salt=b""))
            self.prompts.read(prompt, PromptScores(scores, submit.prompt_logprobs))
        else:
            self._begin(prompt)

    def _begin(self, prompt: Prompt) -> None:
        if prompt.submit.grammar:
            self._grammars.request(prompt.submit)
            self.prompts.compile(prompt)
        else:
            self._generate(prompt)

    def _take_grammars(self) -> None:
        for submit, result in self._grammars.finished():
            prompt = self.prompts.find(submit.id)
            if prompt is None:
                continue  # cancelled meanwhile
            if isinstance(result, IccError):
                self._fail(prompt, result)
            else:
                self._answer_errors(prompt, partial(self._generate, prompt, result))

    def _generate(self, prompt: Prompt, constrain: Constrain | None = None) -> None:
        submit = prompt.submit
        generations = self._loop.add(submit.prompt, submit.params, submit.standing, constrain)
        self._prompt_tokens += len(generations[0].prompt)
        self.prompts.generate(prompt, generations)
        ended = [output for generation in generations for output in generation.outputs]
        if ended:  # the prompt has filled the context already
            self._channel.send(Report(self._deltas(ended), self._stats()))

    def _take_readings(self) -> None:
        """What has been read of prompts; those that are read go on."""
        ended: list[Delta] = []
        for prompt in self.prompts.all_in(PromptStage.READING):
            reading = prompt.reading
            assert reading is not None
            try:
                reading.advance()
            except Exception as error:  # it has been reported as a fault, or its hidden states are not numbers
                self._end(prompt, "error")
                self._channel.send(Failed(prompt.id, 500, error.message if isinstance(error, NotFinite) else _FAILED))
                continue
            if not reading.complete:
                continue
            self._loop.end(reading.scores, "stop")
            if isinstance(reading, PromptScores):
                self._channel.send(PromptLogprobs(prompt.id, tuple(reading.logprobs)))
                self._answer_errors(prompt, partial(self._begin, prompt))
            else:
                self.prompts.end(prompt)
                self._channel.send(Embedded(prompt.id, reading.vector().astype("<f4").tobytes()))
                cached, queued_s = reading.scores.num_cached_tokens or 0, reading.scores.queued_s
                self._cached_tokens += cached
                ended.append(Delta(prompt.id, 0, cached=cached, queued_s=queued_s, reason="stop"))
        if ended:
            self._channel.send(Report(ended, self._stats()))

    def _answer_errors(self, prompt: Prompt, action: Callable[[], None]) -> None:
        try:
            action()
        except IccError as error:
            self._fail(prompt, error)
        except Exception:
            log.exception("a request failed")
            self._end(prompt, "error")
            self._channel.send(Failed(prompt.id, 500, _FAILED))

    def _fail(self, prompt: Prompt, error: IccError) -> None:
        self._end(prompt, "error")
        status = 400 if isinstance(error, RequestError | CapacityError) else 500
        field_name = error.field if isinstance(error, RequestError) else ""
        self._channel.send(Failed(prompt.id, status, error.message, field_name))

    def _expire(self) -> None:
        """End what is past its deadline, wherever it is."""
        ended: list[Delta] = []
        for prompt in self.prompts.late(time.monotonic()):
            if prompt.generations:
                late = [generation for generation in prompt.generations if generation.finish_reason is None]
                self._end(prompt, "deadline")
                ended += [Delta(prompt.id, g.index, text=g.outputs[-1].text, reason="deadline") for g in late]
            else:
                self._end(prompt, "deadline")
                ended += [Delta(prompt.id, n, reason="deadline") for n in range(prompt.submit.params.n)]
        if ended:
            self._channel.send(Report(ended, self._stats()))

    def _end(self, prompt: Prompt, reason: str) -> None:
        """End a prompt and whatever runs for it, wherever it is. Nothing happens if it has ended."""
        if prompt.stage is PromptStage.ENDED:
            return
        for request in prompt.requests:
            self._loop.end(request, reason)
        self.prompts.end(prompt)

    # -- steps -------------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        start = time.perf_counter()
        try:
            outputs = self._loop.step()
        except Exception as error:  # the device has failed for good: the process is started anew
            generations = [completion.generation for completion in self.prompts.completions]
            outputs = [generation.outputs[-1] for generation in generations if generation.outputs]
            self._report(outputs, time.perf_counter() - start)
            raise SystemExit(1) from error
        self._steps += 1
        self._report(outputs, time.perf_counter() - start)
        if self.prompts.count(PromptStage.READING):
            self._take_readings()

    def _report(self, outputs: list[Output], seconds: float) -> None:
        deltas = self._deltas(outputs)
        self._channel.send(Report(deltas, self._stats(), self._loop.last_step_tokens if seconds else 0, seconds))
        self._reported = time.monotonic()

    def _deltas(self, outputs: list[Output]) -> list[Delta]:
        found = [(output, self.prompts.completion(output.request_id)) for output in outputs]
        return [self._delta(output, completion) for output, completion in found if completion is not None]

    def _delta(self, output: Output, completion: RunningCompletion) -> Delta:
        generation, cached = completion.generation, None
        generation.outputs.clear()
        if output.token_id is not None:
            self._output_tokens += 1
        if not completion.begun:
            completion.begun = True
            cached = generation.num_cached_tokens or 0
            if generation.index == 0:
                self._cached_tokens += cached
        if output.finish_reason is not None:
            self.prompts.end_completion(completion)
        return Delta(
            completion.prompt.id,
            generation.index,
            () if output.token_id is None else (output.token_id,),
            output.text,
            () if output.logprob is None else (output.logprob,),
            cached,
            generation.queued_s,
            output.finish_reason,
            output.stop,
        )

    def _stats(self) -> Stats:
        scheduler = self._loop.scheduler
        pools = [group.pool for group in scheduler.kv.groups]
        not_taken_up = self.prompts.count(PromptStage.ARRIVED) + self.prompts.count(PromptStage.COMPILING)
        return Stats(
            scheduler.num_running,
            scheduler.num_waiting + not_taken_up,
            sum(pool.num_blocks - pool.num_available for pool in pools),
            sum(pool.num_cached for pool in pools),
            scheduler.num_preemptions,
            scheduler.num_swaps,
            self._steps,
            self._prompt_tokens,
            self._cached_tokens,
            self._output_tokens,
            self._healed,
        )

    def _check(self) -> None:
        """Nothing runs: every block must be free or cached. If the books are wrong they are made anew, and counted."""
        now = time.monotonic()
        if now - self._checked < _CHECK_S:
            return
        self._checked = now
        try:
            self._loop.scheduler.check()
            assert self._loop.scheduler.kv.is_idle, "blocks are lost"
        except AssertionError as error:
            log.error("the KV bookkeeping was wrong (%s) and is made anew", error)
            self._healed += 1
            self._loop.reset()

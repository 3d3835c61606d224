"""Worker: the engine loop in a process of its own, driven by messages."""

from __future__ import annotations

import sys
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush

from ...errors import CapacityError, IccError, RequestError
from ...llm import LLM
from ...loop.sampler import Constraint
from ...requests.embedding import Embedding
from ...requests.generation import Generation, Output, Standing
from ...requests.scores import NotFinite
from ..api.prompt_logprobs import PromptScores
from .channel import Channel, ChannelClosed
from .messages import HEARTBEAT_S, Delta, Embedded, Failed, PromptLogprobs, Ready, Report, Stats, Submit

_INTAKE = 16  # prompts taken up per step while others run, so that a burst of them does not delay a step
_FAILED = "the request failed inside the engine"
_CHECK_S = 5.0  # an idle engine checks its KV bookkeeping at most this often

# compiles a grammar for as many completions as wanted; calls back from another thread, or gives an error in words
Constrain = Callable[[], Constraint]


class Grammars:
    """Compiles grammars beside the steps. This one knows none."""

    def request(self, submit: Submit) -> None:
        raise RequestError("this engine cannot follow a grammar", "it has no tokenizer", field="response_format")

    def finished(self) -> list[tuple[Submit, Constrain | IccError]]:
        """What has been compiled since the last call."""
        return []


@dataclass(slots=True)
class _Prompt:
    """A prompt under way: its completions that have not ended."""

    generations: list[Generation]
    open: int = field(init=False)

    def __post_init__(self) -> None:
        self.open = len(self.generations)


class Worker:
    """Takes prompts from the channel, runs steps, and reports each step in one message."""

    def __init__(self, llm: LLM, channel: Channel, grammars: Grammars | None = None) -> None:
        self._loop = llm.loop
        self._loop.on_fault = traceback.print_exception
        self._channel = channel
        self._grammars = grammars or Grammars()
        self._queue: deque[Submit] = deque()  # not taken up yet
        self._compiling: set[int] = set()
        self._prompts: dict[int, _Prompt] = {}
        self._owner: dict[int, tuple[int, Generation]] = {}  # by the loop's request id: message id and generation
        self._begun: set[int] = set()  # request ids of which something has been reported
        self._scores: dict[int, tuple[Submit, PromptScores]] = {}
        self._embeddings: dict[int, tuple[Submit, Embedding]] = {}
        self._embeds = llm.manifest.embedding is not None
        self._deadlines: list[tuple[float, int, int]] = []  # a heap: when, message id, completions of it
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
        busy = self._loop.has_work() or bool(self._queue)
        wait = 0.0 if busy else 0.005 if self._compiling else HEARTBEAT_S
        for message in self._channel.receive(wait):
            if isinstance(message, Submit):
                self._queue.append(message)
                if message.deadline is not None:
                    heappush(self._deadlines, (time.monotonic() + message.deadline, message.id, message.params.n))
            else:
                self._cancel(message.id)
        self._expire()
        self._take_grammars()
        for _ in range(min(_INTAKE, len(self._queue))):
            self._take_up(self._queue.popleft())
        if self._loop.has_work():
            self._step()
        elif time.monotonic() - self._reported >= HEARTBEAT_S:
            self._check()
            self._report([], 0.0)

    # -- prompts -----------------------------------------------------------------------------------------------------

    def _take_up(self, submit: Submit) -> None:
        if self._embeds:
            self._answer_errors(submit, lambda: self._embed(submit))
        elif submit.grammar:
            self._compiling.add(submit.id)
            self._answer_errors(submit, lambda: self._grammars.request(submit))
        elif submit.prompt_logprobs is not None:
            self._answer_errors(submit, lambda: self._score(submit))
        else:
            self._answer_errors(submit, lambda: self._add(submit))

    def _take_grammars(self) -> None:
        for submit, result in self._grammars.finished():
            if submit.id not in self._compiling:
                continue  # cancelled meanwhile
            self._compiling.discard(submit.id)
            if isinstance(result, IccError):
                self._fail(submit.id, result)
            else:
                self._answer_errors(submit, lambda submit=submit, result=result: self._add(submit, result))

    def _add(self, submit: Submit, constrain: Constrain | None = None) -> None:
        standing = Standing(submit.priority, submit.client, submit.salt)
        generations = self._loop.add(submit.prompt, submit.params, standing, constrain)
        self._prompt_tokens += len(generations[0].prompt)
        self._prompts[submit.id] = _Prompt(generations)
        ended: list[Delta] = []
        for generation in generations:
            self._owner[generation.request_id] = (submit.id, generation)
            while generation.outputs:  # the prompt has filled the context already
                ended.append(self._delta(generation.outputs.popleft()))
        if ended:
            self._channel.send(Report(ended, self._stats()))

    def _score(self, submit: Submit) -> None:
        """First the prompt's own log-probabilities, then its completions."""
        request_id = self._loop.add_score(submit.prompt, Standing(submit.priority, submit.client))
        self._scores[submit.id] = submit, PromptScores(request_id, submit.prompt, submit.prompt_logprobs or 0)

    def _take_scores(self) -> None:
        for submit, scores in list(self._scores.values()):
            try:
                scores.push(self._loop.take_scores(scores.request_id))
            except Exception:  # it has been reported as a fault
                self._cancel(submit.id)
                self._channel.send(Failed(submit.id, 500, _FAILED))
                continue
            if scores.complete:
                del self._scores[submit.id]
                self._loop.end_score(scores.request_id)
                self._channel.send(PromptLogprobs(submit.id, tuple(scores.logprobs)))
                self._answer_errors(submit, lambda submit=submit: self._add(submit))

    def _embed(self, submit: Submit) -> None:
        standing = Standing(submit.priority, submit.client, submit.salt)
        self._embeddings[submit.id] = submit, self._loop.add_embedding(submit.prompt, standing)
        self._prompt_tokens += len(submit.prompt)

    def _take_embeddings(self) -> None:
        ended: list[Delta] = []
        for submit, embedding in list(self._embeddings.values()):
            try:
                embedding.advance()
            except Exception as error:  # it has been reported as a fault, or its hidden states are not numbers
                self._cancel(submit.id)
                self._channel.send(Failed(submit.id, 500, error.message if isinstance(error, NotFinite) else _FAILED))
                continue
            if embedding.complete:
                self._cancel(submit.id)
                self._channel.send(Embedded(submit.id, embedding.vector().astype("<f4").tobytes()))
                cached, queued_s = embedding.scores.num_cached_tokens or 0, embedding.scores.queued_s
                self._cached_tokens += cached
                ended.append(Delta(submit.id, 0, cached=cached, queued_s=queued_s, reason="stop"))
        if ended:
            self._channel.send(Report(ended, self._stats()))

    def _answer_errors(self, submit: Submit, action: Callable[[], None]) -> None:
        try:
            action()
        except IccError as error:
            self._compiling.discard(submit.id)
            self._fail(submit.id, error)
        except Exception:
            self._compiling.discard(submit.id)
            traceback.print_exc()
            self._channel.send(Failed(submit.id, 500, _FAILED))

    def _fail(self, submit_id: int, error: IccError) -> None:
        status = 400 if isinstance(error, RequestError | CapacityError) else 500
        field_name = error.field if isinstance(error, RequestError) else ""
        self._channel.send(Failed(submit_id, status, error.message, field_name))

    def _expire(self) -> None:
        """End what is past its deadline, wherever it is."""
        ended: list[Delta] = []
        while self._deadlines and self._deadlines[0][0] <= time.monotonic():
            _, submit_id, count = heappop(self._deadlines)
            prompt = self._prompts.get(submit_id)
            if prompt is not None:
                late = [generation for generation in prompt.generations if generation.finish_reason is None]
                self._cancel(submit_id)
                ended += [Delta(submit_id, g.index, text=g.outputs[-1].text, reason="deadline") for g in late]
            elif self._waits(submit_id):
                self._cancel(submit_id)
                ended += [Delta(submit_id, index, reason="deadline") for index in range(count)]
        if ended:
            self._channel.send(Report(ended, self._stats()))

    def _waits(self, submit_id: int) -> bool:
        """Whether a prompt is here that is not taken up yet."""
        if submit_id in self._compiling or submit_id in self._scores or submit_id in self._embeddings:
            return True
        return any(submit.id == submit_id for submit in self._queue)

    def _cancel(self, submit_id: int) -> None:
        self._compiling.discard(submit_id)
        scored = self._scores.pop(submit_id, None)
        if scored is not None:
            self._loop.end_score(scored[1].request_id)
        embedded = self._embeddings.pop(submit_id, None)
        if embedded is not None:
            self._loop.end_score(embedded[1].request_id)
        prompt = self._prompts.pop(submit_id, None)
        if prompt is None:
            self._queue = deque(submit for submit in self._queue if submit.id != submit_id)
            return
        for generation in prompt.generations:
            self._loop.abort(generation)
            self._owner.pop(generation.request_id, None)
            self._begun.discard(generation.request_id)

    # -- steps -------------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        start = time.perf_counter()
        try:
            outputs = self._loop.step()
        except Exception as error:  # the device has failed for good: the process is started anew
            outputs = [generation.outputs[-1] for _, generation in self._owner.values() if generation.outputs]
            self._report(outputs, time.perf_counter() - start)
            raise SystemExit(1) from error
        self._steps += 1
        self._report(outputs, time.perf_counter() - start)
        if self._scores:
            self._take_scores()
        if self._embeddings:
            self._take_embeddings()

    def _report(self, outputs: list[Output], seconds: float) -> None:
        deltas = [self._delta(output) for output in outputs if output.request_id in self._owner]
        self._channel.send(Report(deltas, self._stats(), self._loop.last_step_tokens if seconds else 0, seconds))
        self._reported = time.monotonic()

    def _delta(self, output: Output) -> Delta:
        submit_id, generation = self._owner[output.request_id]
        generation.outputs.clear()
        cached = None
        if output.token_id is not None:
            self._output_tokens += 1
        if output.request_id not in self._begun:
            self._begun.add(output.request_id)
            cached = generation.num_cached_tokens or 0
            if generation.index == 0:
                self._cached_tokens += cached
        if output.finish_reason is not None:
            self._end(output.request_id)
        return Delta(
            submit_id,
            generation.index,
            () if output.token_id is None else (output.token_id,),
            output.text,
            () if output.logprob is None else (output.logprob,),
            cached,
            generation.queued_s,
            output.finish_reason,
        )

    def _end(self, request_id: int) -> None:
        submit_id, _ = self._owner.pop(request_id)
        self._begun.discard(request_id)
        prompt = self._prompts[submit_id]
        prompt.open -= 1
        if not prompt.open:
            del self._prompts[submit_id]

    def _stats(self) -> Stats:
        scheduler = self._loop.scheduler
        pools = [group.pool for group in scheduler.kv.groups]
        return Stats(
            scheduler.num_running,
            scheduler.num_waiting + len(self._queue) + len(self._compiling),
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
            print(f"the KV bookkeeping was wrong ({error}) and is made anew", file=sys.stderr, flush=True)
            self._healed += 1
            self._loop.reset()

"""EngineLoop: schedule -> step -> sample -> update -> outputs, where requests, executor and sampler meet."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from .engine.manifest import Manifest
from .errors import RequestError
from .executor.base import Executor
from .generation import Generation, Output, Piece, Standing
from .params import SamplingParams
from .sampler import Constraint, Sampler
from .scheduler.batch import Draft, ScheduledBatch, StepOutcome, Verdict
from .scheduler.request import RequestSpec
from .scheduler.scheduler import Scheduler, SchedulerConfig
from .speculate.speculator import Speculator
from .speculate.verify import Walk
from .stepping import Flight, Stepper
from .tokenizer import Detokenizer, StopFinder, Tokenizer

DEFAULT_STANDING = Standing()


class EngineLoop:
    """All requests of one executor. Not thread-safe: one thread adds, steps and aborts.

    `step` gives outputs; they also wait in `Generation.outputs` until taken, so that several callers can share the
    loop.
    """

    def __init__(
        self,
        manifest: Manifest,
        executor: Executor,
        tokenizer: Tokenizer | None,
        speculator: Speculator | None = None,
    ) -> None:
        self.speculator = speculator
        self.manifest = manifest
        self.executor = executor
        self.tokenizer = tokenizer
        self.reset()
        self.last_step_tokens = 0
        self._generations: dict[int, Generation] = {}
        self._scores: dict[int, list[np.ndarray]] = {}  # logits of scoring requests, not taken yet
        self._stepper = Stepper(executor)
        self._flight: Flight | None = None  # a step that runs ahead of its scheduling
        self._next_id = 0

    def reset(self) -> None:
        """Begin with an empty KV cache. Requires that there is no work."""
        executor = self.executor
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_batch_size=executor.max_batch_size,
                max_step_tokens=executor.max_step_tokens,
                max_logit_rows=executor.max_logit_rows,
                num_blocks=executor.num_blocks,
                block_size=executor.block_size,
            )
        )

    # -- requests ----------------------------------------------------------------------------------------------------

    def add(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        standing: Standing = DEFAULT_STANDING,
        constrain: Callable[[], Constraint] | None = None,
    ) -> list[Generation]:
        """Queue a prompt; one Generation for each of its `params.n` completions, which share the prompt's KV.

        constrain: gives each completion its grammar. RequestError if the prompt or a parameter is invalid,
        CapacityError if it can never fit; then nothing is queued.
        """
        token_ids = self.check_prompt(prompt)
        params = params.resolve(self.manifest.sampling)
        self._check_params(params)
        generations = [
            self._generation(token_ids, params, index, constrain and constrain()) for index in range(params.n)
        ]
        room = self.manifest.limits.max_seq_len - len(token_ids)
        for generation in generations:
            if room == 0:
                self._finish(generation, "length")
                continue
            limit = min(params.max_tokens, room)
            self.scheduler.add(
                RequestSpec(
                    generation.request_id, token_ids, limit, standing.priority, standing.salt, client=standing.client
                )
            )
            self._generations[generation.request_id] = generation
        return generations

    def check_prompt(self, prompt: Sequence[int]) -> tuple[int, ...]:
        """The prompt's token ids. RequestError if one is out of range, too many, or none and no bos token."""
        model, limits = self.manifest.model, self.manifest.limits
        token_ids = tuple(int(token) for token in prompt)
        if not token_ids:
            if model.bos_token_id is None:
                raise RequestError("the prompt is empty", "give at least one token", field="prompt")
            token_ids = (model.bos_token_id,)
        if len(token_ids) > limits.max_seq_len:
            raise RequestError(
                f"the prompt has {len(token_ids)} tokens, the engine takes at most {limits.max_seq_len}",
                "shorten it, or compile with a larger --max-seq-len",
                field="prompt",
            )
        if min(token_ids) < 0 or max(token_ids) >= model.vocab_size:
            wrong = next(token for token in token_ids if not 0 <= token < model.vocab_size)
            raise RequestError(f"token id {wrong} is not in the vocabulary of {model.vocab_size}", field="prompt")
        return token_ids

    def abort(self, generation: Generation) -> None:
        """End a generation now; nothing happens if it has ended."""
        if generation.finish_reason is None:
            self.scheduler.abort(generation.request_id)
            self._forget(generation.request_id)
            self._finish(generation, "abort", generation.flush())

    def has_work(self) -> bool:
        return self.scheduler.has_work()

    def score(self, token_ids: Sequence[int]) -> Iterator[np.ndarray]:
        """The logits of every position of a sequence, as float32 `[rows, vocab]` chunks in order.

        Each chunk is valid until the next is asked for. Other requests go on beside it.
        """
        token_ids = self.check_prompt(token_ids)
        request_id = self.add_score(token_ids)
        remaining = len(token_ids)
        try:
            while remaining:
                self.step()
                for chunk in self.take_scores(request_id):
                    remaining -= len(chunk)
                    yield chunk
        finally:
            self.end_score(request_id)

    def add_score(self, token_ids: Sequence[int], standing: Standing = DEFAULT_STANDING) -> int:
        """Queue a sequence of which the logits of every position are wanted: the id for `take_scores`."""
        request_id = self._take_id()
        spec = RequestSpec(
            request_id,
            self.check_prompt(token_ids),
            0,
            standing.priority,
            all_logits=True,
            use_cache=False,
            client=standing.client,
        )
        self.scheduler.add(spec)
        self._scores[request_id] = []
        return request_id

    def take_scores(self, request_id: int) -> list[np.ndarray]:
        """The chunks of logits, float32 `[rows, vocab]`, that came since the last call."""
        chunks, self._scores[request_id] = self._scores[request_id], []
        return chunks

    def end_score(self, request_id: int) -> None:
        """Forget a scoring request, wherever it is."""
        self.scheduler.abort(request_id)
        del self._scores[request_id]

    # -- one step ----------------------------------------------------------------------------------------------------

    def step(self) -> list[Output]:
        """Finish one step; outputs of the requests that got a token or ended. Nothing if there is no work.

        A device that samples gets the next step before this one's tokens are looked at, where those do not decide it.
        If the executor or a sampler raises, every request ends with "error" and the exception goes on.
        """
        start = time.perf_counter()
        flight = self._flight or self._start(self.scheduler.schedule(self._drafts()))
        if flight is None:
            self.scheduler.update(())
            return []
        self.last_step_tokens = flight.batch.num_tokens
        try:
            ahead = self.scheduler.schedule_ahead() if flight.on_device and self._may_run_ahead(flight) else None
            self._flight = None if ahead is None else self._start(ahead)
            outcomes, texts, rows = self._take_results(flight)
            now = time.perf_counter()
            if self.speculator is not None:
                self.speculator.settle(flight.batch, outcomes, now - start)
                self.speculator.observe(rows)
        except BaseException:
            self._fail_all()
            raise
        reasons = {done.request_id: done.reason for done in self.scheduler.update(outcomes)}
        outputs: list[Output] = []
        for outcome in outcomes:
            generation = self._generations.get(outcome.request_id)
            if generation is None:
                continue
            if generation.first_token is None:
                generation.first_token = now
            outputs += self._deliver(generation, texts[outcome.request_id], reasons.get(outcome.request_id))
        return outputs

    def _drafts(self) -> dict[int, Draft]:
        """Guesses for the requests that decode. Nobody guesses beside a step that scores: it runs long anyway."""
        if self.speculator is None:
            return {}
        return self.speculator.drafts(self.scheduler.decoding, self._generations)

    def _may_run_ahead(self, flight: Flight) -> bool:
        """Guesses for the next step need this one's tokens; without them, it can be started already."""
        return self.speculator is None or self.speculator.idle([s.request_id for s in flight.batch.sequences])

    def _start(self, batch: ScheduledBatch) -> Flight | None:
        if not batch.sequences:
            return None
        for sequence in batch.sequences:
            generation = self._generations.get(sequence.request_id)
            if generation is not None and generation.num_cached_tokens is None:
                generation.num_cached_tokens = sequence.start
                generation.queued_s = time.perf_counter() - generation.arrival
        try:
            return self._stepper.start(batch, self._generations)
        except BaseException:
            self._fail_all()
            raise

    def _take_results(self, flight: Flight) -> tuple[list[StepOutcome], dict[int, list[Piece]], dict[int, int]]:
        """What the scheduler must know of a step, what it made safe to show, by request, and the logit row behind the
        newest token of each request that goes on."""
        outcomes: list[StepOutcome] = []
        texts: dict[int, list[Piece]] = {}
        rows: dict[int, int] = {}
        for result in self._stepper.results(flight, self._generations):
            if result.walk is None:
                assert result.logits is not None
                self._scores[result.request_id].append(result.logits.copy())
                outcomes.append(StepOutcome(result.request_id, None))
                continue
            outcome, texts[result.request_id] = self._accept(result.request_id, result.walk)
            outcomes.append(outcome)
            if outcome.verdict is Verdict.CONTINUE:
                rows[result.request_id] = result.row
        return outcomes, texts, rows

    def _accept(self, request_id: int, walk: Walk) -> tuple[StepOutcome, list[Piece]]:
        """Take the tokens of a step one by one, as far as the request goes on."""
        pieces: list[Piece] = []
        for number, sample in enumerate(walk.samples):
            accepted = walk.accepted[:number]
            if sample is None:
                return StepOutcome(request_id, None, Verdict.ERROR, accepted), [*pieces, Piece(None, "")]
            try:
                verdict, text = self._generations[request_id].accept(sample)
            except Exception:  # of the tokenizer, on this request's tokens: the others go on
                return StepOutcome(request_id, None, Verdict.ERROR, accepted), [*pieces, Piece(None, "")]
            pieces.append(Piece(sample, text))
            if verdict is not Verdict.CONTINUE:
                break
        return StepOutcome(request_id, sample.token_id, verdict, accepted), pieces

    def _deliver(self, generation: Generation, pieces: list[Piece], reason: str | None) -> list[Output]:
        """One output per token, the last with the reason if the request has ended."""
        outputs: list[Output] = []
        for piece in pieces[:-1]:
            assert piece.sample is not None
            outputs.append(Output(generation.request_id, piece.sample.token_id, piece.text, piece.sample.logprob))
        generation.outputs += outputs
        sample, text = pieces[-1].sample, pieces[-1].text
        if reason in ("length", "error"):
            text += generation.flush()
        token, logprob = (None, None) if sample is None else (sample.token_id, sample.logprob)
        if reason is not None:
            self._forget(generation.request_id)
            return [*outputs, self._finish(generation, reason, text, token, logprob)]
        generation.outputs.append(Output(generation.request_id, token, text, logprob))
        return [*outputs, generation.outputs[-1]]

    # -- parts -------------------------------------------------------------------------------------------------------

    def _check_params(self, params: SamplingParams) -> None:
        vocab_size = self.manifest.model.vocab_size
        for name in ("stop_token_ids", "logit_bias"):
            for token in getattr(params, name):
                if token >= vocab_size:
                    raise RequestError(f"{name}: token id {token} is not in the vocabulary of {vocab_size}", field=name)
        if params.stop and self.tokenizer is None:
            raise RequestError(
                "stop: the engine has no tokenizer, so there is no text", "use stop_token_ids", field="stop"
            )

    def _generation(
        self, prompt: tuple[int, ...], params: SamplingParams, index: int, constraint: Constraint | None
    ) -> Generation:
        model = self.manifest.model
        end_ids = frozenset(params.stop_token_ids).union(() if params.ignore_eos else model.eos_token_ids)
        tokenizer = self.tokenizer
        return Generation(
            request_id=self._take_id(),
            prompt=prompt,
            params=params,
            sampler=Sampler(params, prompt, model.vocab_size, end_ids, index, constraint),
            end_ids=end_ids,
            detokenizer=None if tokenizer is None else Detokenizer(tokenizer, prompt),
            stop_finder=None if tokenizer is None else StopFinder(params.stop),
            arrival=time.perf_counter(),
            index=index,
        )

    def _forget(self, request_id: int) -> None:
        del self._generations[request_id]
        if self.speculator is not None:
            self.speculator.forget(request_id)

    def _take_id(self) -> int:
        self._next_id += 1
        return self._next_id

    def _finish(
        self, generation: Generation, reason: str, text: str = "", token: int | None = None, logprob=None
    ) -> Output:
        generation.finish_reason = reason
        generation.finished = time.perf_counter()
        output = Output(generation.request_id, token, text, logprob, reason)
        generation.outputs.append(output)
        return output

    def _fail_all(self) -> None:
        """End every request after the executor failed in the middle of a step: what the cache holds is unknown."""
        for request_id in [*self._generations, *self._scores]:
            self.scheduler.abort(request_id)
        for generation in list(self._generations.values()):
            self._finish(generation, "error", generation.flush())
            self._forget(generation.request_id)
        self._flight = None
        while self.scheduler.is_stepping:
            self.scheduler.update(())

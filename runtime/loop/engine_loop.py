"""EngineLoop: schedule -> step -> sample -> update -> outputs, where requests, executor and sampler meet."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ..batch.scheduled import Draft, ScheduledBatch, StepOutcome, Verdict
from ..executor.base import Executor
from ..format.manifest import Manifest
from ..requests.embedding import Embedding
from ..requests.generation import Generation, Output, Piece, Standing
from ..requests.intake import Intake
from ..requests.params import SamplingParams
from ..requests.scores import NotFinite, Scores
from ..requests.table import RequestTable
from ..scheduler.config import SchedulerConfig
from ..scheduler.scheduler import Scheduler
from ..speculate.guessing import Guessing
from ..speculate.speculator import Speculator
from ..tokenizer import Tokenizer
from .recovery import Trial
from .sampler import Constraint
from .stepping import Flight, Result, Stepper

DEFAULT_STANDING = Standing()


class EngineLoop:
    """All requests of one executor. Not thread-safe: one thread adds, steps and aborts.

    `step` gives outputs; they also wait in `Generation.outputs` until taken, so that several callers can share the
    loop. `on_fault` gets every exception that a step has met and survived.
    """

    def __init__(
        self,
        manifest: Manifest,
        executor: Executor,
        tokenizer: Tokenizer | None,
        speculator: Speculator | None = None,
    ) -> None:
        self.manifest = manifest
        self.executor = executor
        self.tokenizer = tokenizer
        self.on_fault: Callable[[Exception], object] = lambda error: None
        self.last_step_tokens = 0
        self._intake = Intake(manifest, tokenizer)
        self._requests = RequestTable(self._intake)
        self._generations, self._scores = self._requests.generations, self._requests.scores
        self._stepper = Stepper(executor)
        self._flight: Flight | None = None  # a step that runs ahead of its scheduling
        self._guessing = Guessing(speculator, manifest.model.vocab_size, lambda error: self.on_fault(error))
        self.reset()

    @property
    def speculator(self) -> Speculator | None:
        """Who guesses; None if nobody does, or its drafter has failed."""
        return self._guessing.speculator

    @speculator.setter
    def speculator(self, speculator: Speculator | None) -> None:
        self._guessing.speculator = speculator

    def reset(self) -> None:
        """Begin with an empty KV cache. Requires that nothing is scheduled."""
        executor = self.executor
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_batch_size=executor.max_batch_size,
                max_step_tokens=executor.max_step_tokens,
                max_logit_rows=executor.max_logit_rows,
                groups=executor.groups,
            )
        )
        self._requests.scheduler = self.scheduler

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
        return self._requests.add(prompt, params, standing, constrain)

    def abort(self, generation: Generation) -> None:
        """End a generation now; nothing happens if it has ended."""
        if generation.finish_reason is None:
            self._forget(generation.request_id)
            generation.finish("abort", generation.flush())

    def has_work(self) -> bool:
        return bool(self._requests.live)

    def score(self, token_ids: Sequence[int]) -> Iterator[np.ndarray]:
        """The logits of every position of a sequence, as float32 `[rows, vocab]` chunks in order.

        Each chunk is valid until the next is asked for. Other requests go on beside it.
        """
        self._intake.check_task("generate")
        token_ids = self._intake.prompt(token_ids)
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
        return self._requests.add_score(token_ids, standing)

    def add_embedding(self, token_ids: Sequence[int], standing: Standing = DEFAULT_STANDING) -> Embedding:
        """Queue a sequence that is to become one vector; `advance` of what is given takes in its hidden states."""
        self._intake.check_task("embed")
        facts = self.manifest.embedding
        assert facts is not None
        tokens = self._intake.prompt(token_ids)
        if facts.pooling == "cls":  # attention is causal: nothing that comes behind the first token changes its state
            tokens = tokens[:1]
        request_id = self._requests.add_score(tokens, standing, last_row=facts.pooling != "mean")
        return Embedding(request_id, facts, len(tokens), self._scores[request_id])

    def take_scores(self, request_id: int) -> list[np.ndarray]:
        """The chunks of logits, float32 `[rows, vocab]`, that came since the last call. Raises what ended it."""
        return self._scores[request_id].take()

    def end_score(self, request_id: int) -> None:
        """Forget a scoring request, wherever it is."""
        self._forget(request_id)
        del self._scores[request_id]

    # -- one step ----------------------------------------------------------------------------------------------------

    def step(self) -> list[Output]:
        """Finish one step; outputs of the requests that got a token or ended. Nothing if there is no work.

        A device that samples gets the next step before this one's tokens are looked at, where those do not decide it.
        If a step fails, its requests begin anew in an empty cache, in groups (see `Trial`), and the one that fails
        alone ends with "error". If the device has failed for good, all do, and the exception goes on.
        """
        start = time.perf_counter()
        if self._requests.trial.group_done:
            self._requests.next_group()
        try:
            flight, outcomes, pieces, rows = self._run()
        except Exception as error:
            return self._recover(error)
        except BaseException:
            self._fail_all()
            raise
        if flight is None:
            return []
        now = time.perf_counter()
        # the step that runs ahead has overwritten what draft heads would read
        self._guessing.learn(flight.batch, outcomes, rows if self._flight is None else None, start)
        broken: Exception | None = None
        try:
            reasons = {done.request_id: done.reason for done in self.scheduler.update(outcomes)}
        except Exception as error:  # what was sampled is good all the same
            reasons = {o.request_id: o.verdict.value for o in outcomes if o.verdict is not Verdict.CONTINUE}
            broken = error
        outputs: list[Output] = []
        for outcome in outcomes:
            generation = self._generations.get(outcome.request_id)
            if generation is None:
                if outcome.request_id in reasons:  # all of it is scored
                    self._forget(outcome.request_id)
                continue
            if generation.first_token is None:
                generation.first_token = now
                self._guessing.wake()
            outputs += self._deliver(generation, pieces[outcome.request_id], reasons.get(outcome.request_id))
            if self._requests.trial.running:
                self._requests.trial.clear(outcome.request_id)
        return outputs if broken is None else outputs + self._recover(broken, flight.batch)

    def _run(self) -> tuple[Flight | None, list[StepOutcome], dict[int, list[Piece]], dict[int, int]]:
        """Run the next step, and start the one after it where that can be."""
        if self._flight is None:
            self._flight = self._start(self.scheduler.schedule(self._drafts()))
        flight = self._flight
        if flight is None:
            self.scheduler.update(())
            return None, [], {}, {}
        self.last_step_tokens = flight.batch.num_tokens
        ahead = self.scheduler.schedule_ahead() if flight.on_device and self._may_run_ahead(flight) else None
        following = None if ahead is None else self._start(ahead)
        results = self._take_results(flight)
        self._flight = following
        return flight, *results

    def _drafts(self) -> dict[int, Draft]:
        """Guesses for the requests that decode, unless they are on trial."""
        if self._requests.trial.running:
            return {}
        return self._guessing.drafts(self.scheduler.decoding, self._generations)

    def _may_run_ahead(self, flight: Flight) -> bool:
        """Guesses for the next step need this one's tokens; without them, it can be started already."""
        if self._requests.trial.running:
            return False
        return self._guessing.idle([s.request_id for s in flight.batch.sequences])

    def _start(self, batch: ScheduledBatch) -> Flight | None:
        if not batch.sequences:
            return None
        for sequence in batch.sequences:
            request = self._generations.get(sequence.request_id) or self._scores[sequence.request_id]
            if request.num_cached_tokens is None:
                request.num_cached_tokens = sequence.start
                request.queued_s = time.perf_counter() - request.arrival
        typical = None if self.speculator is None else self.speculator.typical
        return self._stepper.start(batch, self._generations, typical)

    def _take_results(self, flight: Flight) -> tuple[list[StepOutcome], dict[int, list[Piece]], dict[int, int]]:
        """What the scheduler must know of a step, what it made safe to show, by request, and the logit row behind the
        newest token of each request that goes on."""
        outcomes: list[StepOutcome] = []
        texts: dict[int, list[Piece]] = {}
        rows: dict[int, int] = {}
        for result in self._stepper.results(flight, self._generations):
            if result.walk is None:
                assert result.logits is not None
                outcomes.append(self._take_rows(self._scores[result.request_id], result))
                continue
            outcome, texts[result.request_id] = self._generations[result.request_id].take(result.walk)
            outcomes.append(outcome)
            if outcome.verdict is Verdict.ERROR and (fault := self._generations[result.request_id].fault) is not None:
                self.on_fault(fault)
            elif outcome.verdict is Verdict.CONTINUE:
                rows[result.request_id] = result.row
        return outcomes, texts, rows

    def _take_rows(self, scores: Scores, result: Result) -> StepOutcome:
        """Rows of a request that samples nothing. Hidden states that are no numbers end it; nobody shares its KV."""
        assert result.logits is not None
        if self.manifest.embedding is None or np.isfinite(result.logits).all():
            scores.push(result.logits, result.row)
            return StepOutcome(result.request_id, None)
        scores.fault = NotFinite("the model failed on this request: its hidden states are not numbers")
        return StepOutcome(result.request_id, None, Verdict.ERROR)

    def _deliver(self, generation: Generation, pieces: list[Piece], reason: str | None) -> list[Output]:
        if reason is not None:
            self._forget(generation.request_id)
        return generation.emit(pieces, reason)

    def _forget(self, request_id: int) -> None:
        if self._requests.forget(request_id):
            self._guessing.forget(request_id)

    # -- faults ------------------------------------------------------------------------------------------------------

    def _recover(self, error: Exception, stepped: ScheduledBatch | None = None) -> list[Output]:
        """After a step that failed, what the cache holds is unknown: all begin anew, those of the step on trial."""
        self.on_fault(error)
        batches = [stepped] if stepped is not None else self.scheduler.under_way
        ids = {sequence.request_id for batch in batches for sequence in batch.sequences} or self.scheduler.request_ids
        self._begin_anew()
        outputs: list[Output] = []
        for generation in list(self._generations.values()):  # its last token may just have come
            if len(generation.token_ids) >= self._requests.live[generation.request_id].max_new_tokens:
                outputs += self._deliver(generation, [Piece(None, "")], "length")
        culprit = self._requests.trial.failed(self._requests.live.keys() & ids)
        if culprit is not None:
            if not self._stepper.works():
                self._fail_all()
                raise error
            outputs += self._blame(culprit, error)
        self._requests.next_group()
        return outputs

    def _begin_anew(self) -> None:
        """Forget every step and everything that is computed; nothing is scheduled then."""
        self._stepper.drop()
        self._flight = None
        before = self.scheduler
        self.reset()
        self.scheduler.num_preemptions, self.scheduler.num_swaps = before.num_preemptions, before.num_swaps

    def _blame(self, request_id: int, error: Exception) -> list[Output]:
        """End the request with its fault."""
        generation = self._generations.get(request_id)
        if generation is None:
            self._scores[request_id].fault = error
            self._forget(request_id)
            return []
        generation.fault = error
        return self._deliver(generation, [Piece(None, "")], "error")

    def _fail_all(self) -> None:
        """End every request: the device is of no use any more, or nobody waits."""
        self._begin_anew()
        self._requests.trial = Trial()
        for generation in list(self._generations.values()):
            self._deliver(generation, [Piece(None, "")], "error")
        for request_id in list(self._requests.live):
            self._forget(request_id)

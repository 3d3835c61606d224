"""EngineLoop: schedule -> step -> sample -> update -> outputs. It connects requests, executor and speculator."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from ..batch.scheduled import Draft, ScheduledBatch, Verdict
from ..executor.base import Executor
from ..format.manifest import Manifest
from ..kv.events import KVEvent, KVEvents
from ..prefixes.pinned import PinnedPrefixes
from ..requests.embedding import PooledRequest
from ..requests.generation import Generation
from ..requests.intake import Intake
from ..requests.params import SamplingParams
from ..requests.request import Output, Request, Standing
from ..requests.sampler import Constrain
from ..requests.scores import ScoreRequest
from ..requests.search import SearchRequest
from ..requests.table import RequestTable
from ..requests.tail import Tail
from ..scheduler.config import SchedulerConfig
from ..scheduler.scheduler import Scheduler
from ..tokenizer import Tokenizer
from .stepping import Flight, Stepper, StepResult

if TYPE_CHECKING:
    from ..speculate.speculator import Speculator

DEFAULT_STANDING = Standing()
T = TypeVar("T")


class EngineLoop:
    """Runs all requests of one executor. Not thread-safe: one thread makes all calls.

    `step` returns outputs; they also wait in `Generation.outputs` until taken, so that several callers can share the
    loop. speculator: drafts tokens; None without speculation, or after it failed. on_fault: called with every exception
    of a step after which the loop continues. tail: the layers that an embedding engine computes after pooling.
    last_step_tokens: how many tokens ran in the last call of `step`.
    """

    def __init__(
        self,
        manifest: Manifest,
        executor: Executor,
        tokenizer: Tokenizer | None,
        speculator: Speculator | None = None,
        tail: Tail = (),
    ) -> None:
        self.manifest = manifest
        self.executor = executor
        self.tokenizer = tokenizer
        self.speculator = speculator
        self.on_fault: Callable[[Exception], object] = lambda error: None
        self.last_step_tokens = 0
        self._kv_events: KVEvents | None = None
        self._pinned: PinnedPrefixes | None = None
        self.requests = RequestTable(Intake(manifest, tokenizer, tail, executor.inputs), self._make_scheduler)
        self._stepper = Stepper(executor)
        self._flights: list[Flight] = []  # steps in flight, the oldest first

    def _make_scheduler(self) -> Scheduler:
        executor = self.executor
        scheduler = Scheduler(
            SchedulerConfig(
                max_batch_size=executor.max_batch_size,
                max_step_tokens=executor.max_step_tokens,
                max_logit_rows=executor.max_logit_rows,
                groups=executor.groups,
            )
        )
        if self._kv_events is not None:
            self._kv_events.cleared()
            scheduler.kv.record(self._kv_events)
        if self._pinned is not None:
            self._pinned.install(scheduler.kv)
        return scheduler

    def keep(self, prefixes: PinnedPrefixes) -> None:
        """Keep prefixes in the cache from now on; missing ones are computed before this returns. Requires that nothing
        is queued."""
        self._pinned = prefixes
        prefixes.install(self.scheduler.kv)
        self.requests.shared_length = prefixes.common
        for tokens in prefixes.missing(self.scheduler.kv):
            self.add(tokens, SamplingParams(max_tokens=1, temperature=0))
        while self.has_work():
            self.step()

    def watch_kv(self) -> None:
        """Record changes of the prefix caches from now on, for `take_kv_events`."""
        self._kv_events = KVEvents()
        self.scheduler.kv.record(self._kv_events)

    def take_kv_events(self) -> Sequence[KVEvent]:
        """The changes of the prefix caches since the last call; empty if they are not watched."""
        return () if self._kv_events is None else self._kv_events.take()

    @property
    def scheduler(self) -> Scheduler:
        """The current scheduler; a failed step replaces it."""
        return self.requests.scheduler

    def reset(self) -> None:
        """Start again with an empty KV cache. Requires that nothing is scheduled."""
        self.requests.reset()

    # -- requests ----------------------------------------------------------------------------------------------------

    def add(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        standing: Standing = DEFAULT_STANDING,
        constrain: Constrain | None = None,
    ) -> list[Generation]:
        """Queue a prompt; one Generation for each of its `params.n` completions, which share the prompt's KV.

        constrain: makes the grammar constraint of each completion; None: no grammar. RequestError if the prompt or a
        parameter is invalid, CapacityError if it can never fit; then nothing is queued.
        """
        return self.requests.add(prompt, params, standing, constrain)

    def add_score(self, token_ids: Sequence[int], standing: Standing = DEFAULT_STANDING) -> ScoreRequest:
        """Queue a sequence to get the logits of every position; see `ScoreRequest.take`."""
        return self.requests.add_score(token_ids, standing)

    def add_embedding(
        self, token_ids: Sequence[int], skipped: int, standing: Standing = DEFAULT_STANDING
    ) -> PooledRequest:
        """Queue a sequence to get one vector; call `advance` of the result after each step to take in hidden states.
        skipped: how many of its first tokens are not pooled."""
        return self.requests.add_embedding(token_ids, standing, skipped)

    def end(self, request: Request, reason: str = "abort") -> list[Output]:
        """End a request now; returns its last outputs, none if it has ended already."""
        if isinstance(request, Generation) and request.request_id in self.requests.live:
            self._ask(lambda speculator: speculator.forget(request.request_id), None)
        return self.requests.end(request, reason)

    def has_work(self) -> bool:
        """Whether a request has not ended."""
        return bool(self.requests.live)

    # -- one step ----------------------------------------------------------------------------------------------------

    def step(self) -> list[Output]:
        """Finish one step; returns the outputs of requests that got a token or ended. Does nothing if there is no work.

        A device that samples gets the next step before the host reads this one's tokens, unless it depends on them; a
        pipelined device gets steps of other requests meanwhile. If a step fails, its requests start again in an empty
        cache, in groups (see `Trial`), and a request that fails alone ends with "error". If the device has failed
        permanently, all requests end and the exception is raised.
        """
        start, self.last_step_tokens = time.perf_counter(), 0
        if self.requests.trial.group_done:
            self.requests.next_group()
        try:
            result = self._run()
        except Exception as error:
            return self._recover(error)
        except BaseException:
            self._fail_all()
            raise
        if result is None:
            return []
        now = time.perf_counter()
        # a step that was started early has overwritten the rows that draft heads would read
        rows = None if self._flights else result.rows
        self._ask(lambda speculator: self._tell(speculator, result), None)
        self._ask(lambda speculator: speculator.learn(result.batch, result.outcomes, rows, now - start), None)
        outputs, broken = self._deliver(result, now)
        return outputs if broken is None else outputs + self._recover(broken, result.batch)

    def _run(self) -> StepResult | None:
        """Start the steps that need not wait for the oldest step in flight, then finish that one; None if there is
        nothing to run."""
        if not self._flights:
            batch = self.requests.schedule(self._drafts(), self._most_flights)
            if not batch.sequences:
                self.requests.update(())
                return None
            self._flights.append(self._start(batch))
        flight = self._flights[0]
        self.last_step_tokens = flight.batch.num_tokens
        while (following := self._following(flight)) is not None:
            self._flights.append(self._start(following))
        result = self._stepper.finish(flight, self.requests.live)
        del self._flights[0]
        return result

    @property
    def _most_flights(self) -> int:
        """How many steps of different requests may be in flight: one if drafts depend on the previous step, or if
        requests are on trial."""
        return 1 if self.speculator is not None or self.requests.trial.running else self._stepper.flights

    def _following(self, flight: Flight) -> ScheduledBatch | None:
        """The step to start while `flight`, and perhaps others, are in flight; None: wait for `flight` first."""
        if self._stepper.flights > 1:
            return self.requests.schedule_beside(self._most_flights)
        if len(self._flights) > 1 or not flight.on_device or not self._may_run_ahead(flight):
            return None
        return self.requests.schedule_ahead()

    def _start(self, batch: ScheduledBatch) -> Flight:
        speculator = self.speculator
        if speculator is None:
            return self._stepper.start(batch, self.requests.live)
        wanted = speculator.drafter.needs_choices
        return self._stepper.start(batch, self.requests.live, speculator.typical, wanted)

    def _deliver(self, result: StepResult, now: float) -> tuple[list[Output], Exception | None]:
        """Deliver a step's results: the outputs of its requests, and the scheduler's error; None if there is none."""
        reasons, broken = self.requests.update(result.outcomes)
        outputs: list[Output] = []
        for outcome in result.outcomes:
            request, reason = self.requests.live.get(outcome.request_id), reasons.get(outcome.request_id)
            if request is None:
                continue
            if isinstance(request, Generation | SearchRequest):
                if outcome.verdict is Verdict.ERROR and request.fault is not None:
                    self.on_fault(request.fault)
                if request.first_token is None:
                    request.first_token = now
                    self._ask(lambda speculator: speculator.wake(), None)
            outputs += request.deliver() if reason is None else self.end(request, reason)
        return outputs, broken

    # -- speculation -------------------------------------------------------------------------------------------------

    def _drafts(self) -> dict[int, Draft]:
        """Drafts for the decoding requests, by request id; none while requests are on trial."""
        if self.speculator is None or self.requests.trial.running:
            return {}
        decoding = [self.requests.generation(request_id) for request_id in self.scheduler.decoding]
        vocab_size = self.manifest.model.vocab_size

        def sound(speculator: Speculator) -> dict[int, Draft]:
            drafts = speculator.drafts([g for g in decoding if g is not None])
            return {i: draft for i, draft in drafts.items() if draft.is_sound(vocab_size)}

        return self._ask(sound, {})

    def _tell(self, speculator: Speculator, result: StepResult) -> None:
        """Tell the drafter about a step that has run, with those of its requests that sample."""
        if speculator.drafter.follows:
            ids = {sequence.request_id for sequence in result.batch.sequences}
            found = {i: generation for i in ids if (generation := self.requests.generation(i)) is not None}
            speculator.follow(result.batch, found)
        if result.choices:
            speculator.drafter.take_choices(result.batch, result.choices)

    def _may_run_ahead(self, flight: Flight) -> bool:
        """Whether the next step can be started already: drafts for it would need this step's tokens."""
        if self.requests.trial.running or (self.speculator is not None and self.speculator.drafter.follows):
            return False
        decoding = [s.request_id for s in flight.batch.sequences if s.num_logits]
        return not decoding or self._ask(lambda speculator: speculator.idle(decoding), True)

    def _ask(self, question: Callable[[Speculator], T], otherwise: T) -> T:
        """Ask the speculator; `otherwise` if there is none. If it fails it is dropped: it changes no token, so no
        request has to end."""
        if self.speculator is None:
            return otherwise
        try:
            return question(self.speculator)
        except Exception as error:
            self.on_fault(error)
            self.speculator.drafter.close()
            self.speculator = None
            return otherwise

    # -- faults ------------------------------------------------------------------------------------------------------

    def _recover(self, error: Exception, stepped: ScheduledBatch | None = None) -> list[Output]:
        """Restart all requests after a failed step, because the cache's content is unknown; those of the step go on
        trial."""
        self.on_fault(error)
        batches = [stepped] if stepped is not None else self.scheduler.under_way
        ids = {sequence.request_id for batch in batches for sequence in batch.sequences} or self.scheduler.request_ids
        self._begin_anew()
        outputs: list[Output] = []
        for request in list(self.requests.live.values()):
            if request.has_all_tokens:  # its last token has just arrived
                outputs += self.end(request, "length")
        culprit = self.requests.suspect(ids)
        if culprit is not None:
            if not self._stepper.works():
                self._fail_all()
                raise error
            culprit.fault = error
            outputs += self.end(culprit, "error")
        self.requests.next_group()
        return outputs

    def _begin_anew(self) -> None:
        """Drop all steps in flight and all computed KV; nothing is scheduled then."""
        self._stepper.drop()
        self._flights.clear()
        self.requests.begin_anew()

    def _fail_all(self) -> None:
        """End every request: the device has failed, or the loop was interrupted."""
        self._begin_anew()
        self.requests.acquit()
        for request in list(self.requests.live.values()):
            self.end(request, "error")

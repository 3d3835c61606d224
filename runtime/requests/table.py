"""RequestTable: owns the requests of an engine loop from arrival to end, and changes their states (see `Request`)
together with the scheduler."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeVar

from ..batch.scheduled import Draft, ScheduledBatch, StepOutcome, Verdict
from ..scheduler.request import RequestSpec
from ..scheduler.scheduler import Scheduler
from .embedding import PooledRequest, counts_every_row
from .extras import isolating_salt
from .generation import Generation
from .intake import Intake
from .params import SamplingParams
from .request import Output, Request, Standing, State
from .sampler import Constrain
from .scores import ScoreRequest
from .search import SearchRequest
from .trial import Trial

Admitted = TypeVar("Admitted", bound=Request)


def _none(tokens: Sequence[int]) -> int:
    return 0


class RequestTable:
    """All requests that have not ended. All are queued with the scheduler, or, after a failed step, only the group that
    is on trial.

    live: every request that has not ended, by id, in order of arrival. shared_length: gives how many of a prompt's
    first tokens are not private to the client, because they belong to the engine's own prompts.
    """

    def __init__(self, intake: Intake, make_scheduler: Callable[[], Scheduler]) -> None:
        self.intake, self._make_scheduler = intake, make_scheduler
        self.live: dict[int, Request] = {}
        self.shared_length: Callable[[Sequence[int]], int] = _none
        self.trial = Trial()
        self.scheduler = make_scheduler()
        self._next_id = 0

    def reset(self) -> None:
        """Start again with an empty KV cache. Requires that nothing is scheduled."""
        self.scheduler = self._make_scheduler()

    # -- arrival -----------------------------------------------------------------------------------------------------

    def add(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        standing: Standing,
        constrain: Constrain | None,
    ) -> list[Generation]:
        """Add the completions of a prompt; see `EngineLoop.add`."""
        self.intake.check_generates()
        token_ids, params = self.intake.prompt(prompt), self.intake.params(params)
        room = min(params.max_tokens, self.intake.room(token_ids))
        if params.beams > 1:
            return self._add_search(self._spec(token_ids, standing, room), params, constrain)
        generations = [
            self.intake.generation(self._spec(token_ids, standing, room), params, index, constrain and constrain())
            for index in range(params.n)
        ]
        for generation in generations:
            if room:
                self._admit(generation)
            else:
                generation.deliver("length")
        return generations

    def _add_search(self, spec: RequestSpec, params: SamplingParams, constrain: Constrain | None) -> list[Generation]:
        """Add the completions of a prompt under beam search; only the search itself is queued."""
        first = self._next_id + 1
        self._next_id += params.n
        generations = [
            self.intake.generation(spec._replace(request_id=first + index), params, index, None)
            for index in range(params.n)
        ]
        spec = spec._replace(beams=params.beams)
        search = self.intake.search(spec, generations, constrain and constrain())
        if spec.max_new_tokens:
            self._admit(search)
        else:
            search.deliver("length")
        return generations

    def add_score(self, token_ids: Sequence[int], standing: Standing) -> ScoreRequest:
        """Add a sequence whose logits are wanted at every position."""
        self.intake.check_generates()
        spec = self._spec(self.intake.prompt(token_ids), standing, all_rows=True)
        return self._admit(ScoreRequest(spec=spec))

    def add_rows(self, token_ids: Sequence[int]) -> ScoreRequest:
        """Add a sequence of which all output rows of the program are wanted: logits, or hidden states."""
        return self._admit(ScoreRequest(spec=self._spec(self.intake.prompt(token_ids), Standing(), all_rows=True)))

    def add_embedding(self, token_ids: Sequence[int], standing: Standing, skipped: int) -> PooledRequest:
        """Add a sequence of which one vector is wanted; the first `skipped` tokens are not pooled."""
        facts = self.intake.embedding()
        tokens = self.intake.prompt(token_ids)
        whole, every_row = self.scheduler.kv.whole, counts_every_row(facts)
        first_row = facts.pooling == "cls" and not every_row
        if first_row and not whole:  # later tokens do not change the first token's state
            tokens = tokens[:1]
        spec = self._spec(tokens, standing, all_rows=every_row, first_row=first_row and whole)
        return PooledRequest(self._admit(ScoreRequest(spec=spec, finite=True)), facts, self.intake.tail, skipped)

    def _spec(
        self,
        tokens: tuple[int, ...],
        standing: Standing,
        max_new_tokens: int = 0,
        all_rows: bool = False,
        first_row: bool = False,
    ) -> RequestSpec:
        """Make the scheduler's record of a request. all_rows: the rows of all tokens are wanted; else only that of the
        last token, or with `first_row` of the first."""
        extras = self.intake.extras(standing.extras)
        shared = 0 if extras else self.shared_length(tokens)
        self._next_id += 1
        return RequestSpec(
            self._next_id,
            tokens,
            max_new_tokens,
            standing.priority,
            isolating_salt(standing.salt, extras),
            all_logits=all_rows,
            use_cache=not all_rows,  # cached tokens would give no rows
            client=standing.client,
            first_row=first_row,
            first_turn=standing.first_turn or self.intake.first_turn(tokens),
            extras=extras,
            own_salt=standing.adapter,
            own_from=standing.adapter_from,
            salt_from=0 if standing.adapter and standing.adapter_from < shared else shared,
        )

    def _admit(self, request: Admitted) -> Admitted:
        """Queue a request, or hold it while others are on trial. CapacityError if it can never fit."""
        if self.trial.running:
            self.scheduler.validate(request.spec)
            request.hold()
        else:
            self._queue(request)
        self.live[request.request_id] = request
        return request

    def _queue(self, request: Request) -> None:
        self.scheduler.add(request.spec, request.sampled)
        request.queue()

    # -- steps -------------------------------------------------------------------------------------------------------

    def generation(self, request_id: int) -> Generation | None:
        """The live request with this id if it samples; else None."""
        request = self.live.get(request_id)
        return request if isinstance(request, Generation) else None

    def schedule(self, drafts: Mapping[int, Draft], flights: int = 1) -> ScheduledBatch:
        """The next step. Updates the states of requests that run in it, were preempted for it, or have guesses in
        it."""
        batch = self.scheduler.schedule(drafts, flights)
        for request_id in self.scheduler.take_preempted():
            self.live[request_id].preempt()
        self._run(batch)
        return batch

    def schedule_ahead(self) -> ScheduledBatch | None:
        """The step after the one in flight, None if it must wait; see `Scheduler.schedule_ahead`."""
        return self._run_more(self.scheduler.schedule_ahead())

    def schedule_beside(self, flights: int) -> ScheduledBatch | None:
        """A step beside those in flight, None if there is none now; see `Scheduler.schedule_beside`."""
        return self._run_more(self.scheduler.schedule_beside(flights))

    def _run_more(self, batch: ScheduledBatch | None) -> ScheduledBatch | None:
        if batch is not None:
            self._run(batch)
        return batch

    def _run(self, batch: ScheduledBatch) -> None:
        for sequence in batch.sequences:
            request = self.live[sequence.request_id]
            if request.state is State.WAITING:
                request.run(sequence.start)
            if sequence.draft is not None:
                request.guess()

    def update(self, outcomes: Sequence[StepOutcome]) -> tuple[dict[int, str], Exception | None]:
        """Account for a step. Returns the reasons of requests that end by it, and the scheduler's error, None if there
        is none; sampled tokens are valid in either case."""
        for outcome in outcomes:
            if (request := self.live.get(outcome.request_id)) is not None:
                if request.state is State.GUESSING:
                    request.settle()
                if self.trial.running and (outcome.token_id is not None or isinstance(request, SearchRequest)):
                    self.trial.clear(outcome.request_id)
        try:
            reasons = {done.request_id: done.reason for done in self.scheduler.update(outcomes)}
            for outcome in outcomes:
                request = self.live.get(outcome.request_id)
                if isinstance(request, SearchRequest) and outcome.request_id not in reasons:
                    if (reason := request.advance(self.scheduler)) is not None:
                        reasons[outcome.request_id] = reason
            return reasons, None
        except Exception as error:
            return {o.request_id: o.verdict.value for o in outcomes if o.verdict is not Verdict.CONTINUE}, error

    def end(self, request: Request, reason: str) -> list[Output]:
        """End a request in any state; returns its last outputs, none if it has ended already. All completions of a beam
        search end together."""
        if isinstance(request, Generation) and request.search is not None:
            request = request.search
        if request.state is State.ENDED:
            return []
        self.scheduler.abort(request.request_id)
        self.trial.clear(request.request_id)
        del self.live[request.request_id]
        return request.deliver(reason)

    # -- faults ------------------------------------------------------------------------------------------------------

    def begin_anew(self) -> None:
        """Hold all requests, because all KV is lost, and make a new scheduler, which continues the counts."""
        before = self.scheduler
        self.reset()
        self.scheduler.queues.go_on_counting(before.queues)
        for request in self.live.values():
            if request.state is not State.HELD:
                request.hold()

    def suspect(self, request_ids: Collection[int]) -> Request | None:
        """A step of these requests failed, and all requests are held: returns the culprit, None if it may be one of
        several."""
        culprit = self.trial.failed(self.live.keys() & request_ids)
        return None if culprit is None else self.live[culprit]

    def next_group(self) -> None:
        """Queue only the next group of suspects; all requests if there are no more suspects."""
        for request_id in self.scheduler.request_ids:
            self.scheduler.abort(request_id)
            self.live[request_id].hold()
        for request_id in self.trial.next_group(self.live) or self.live:
            self._queue(self.live[request_id])

    def acquit(self) -> None:
        """End the trial; all requests stay held."""
        self.trial = Trial()

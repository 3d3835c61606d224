"""Scheduler: decides which tokens of which requests run in the next step, and in which KV blocks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ..batch.scheduled import Draft, Finished, ScheduledBatch, ScheduledSequence, StepOutcome, Verdict
from ..errors import CapacityError, RequestError
from ..kv.cache import KVCache
from .beams import Beams
from .composer import StepComposer
from .config import SchedulerConfig
from .queues import Queues
from .request import RequestSpec, ScheduledRequest


class Scheduler:
    """The cycle is `schedule() -> step -> update(outcomes)`; `add` and `abort` may come at any time between calls.

    `queues` keep running and waiting requests in order of rank (priority, fair share, arrival). A step first runs one
    token of each decoding request, then chunks of unfinished prefills, then admits waiting requests (see StepComposer).
    An admitted request gets blocks for all tokens known so far, so only decodes ever need more; if there are none left,
    the request of the lowest rank is preempted: it loses its blocks, whose KV is kept in host memory if there is room,
    else computed again. The request of the highest rank can always run, because it fits alone (`add` refuses others),
    so that some request always finishes.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.kv = KVCache(config.groups)
        self.queues = Queues(self.kv)
        self._composer = StepComposer(config, self.kv, self.queues)
        self._steps: list[ScheduledBatch] = []  # scheduled steps without `update` yet, the oldest first

    # -- events ------------------------------------------------------------------------------------------------------

    def validate(self, spec: RequestSpec) -> None:
        """Raise CapacityError if a request can never fit, RequestError if it is empty or its id is in use."""
        if spec.request_id in self.queues.requests:
            raise RequestError(f"request id {spec.request_id} is in use")
        if not spec.token_ids:
            raise RequestError("a request needs at least one token")
        if self.kv.whole and len(spec.token_ids) > self.config.max_step_tokens:
            raise CapacityError(
                f"the request has {len(spec.token_ids)} tokens, which must all be in one step of at most "
                f"{self.config.max_step_tokens}",
                "shorten it",
            )
        if spec.beams > self.config.max_batch_size:
            raise CapacityError(
                f"{spec.beams} beams run at once, and the engine takes {self.config.max_batch_size} sequences at once",
                "use fewer beams, or compile with a larger --max-batch-size",
            )
        if (group := self.kv.too_small([spec.demand])) is not None:
            needed = group.most_together(spec.demand)
            raise CapacityError(
                f"the request needs {needed} KV blocks of {group.block_size} tokens, the cache has {group.num_lent}",
                "shorten the prompt, lower max_tokens, or give the KV cache more memory",
            )

    def add(self, spec: RequestSpec, sampled: Sequence[int] = ()) -> None:
        """Queue a request; `sampled`: tokens after its prompt that are already known. Raises as `validate`."""
        self.validate(spec)
        self.queues.arrive(spec, sampled)

    def abort(self, request_id: int) -> bool:
        """End a request now and release its blocks. False if there is no such request (it may have ended already)."""
        request = self.queues.requests.get(request_id)
        if request is None:
            return False
        self.queues.remove(request)
        return True

    def branch(self, request_id: int, choices: Sequence[tuple[int, int]]) -> list[int]:
        """Continue a request whose beams all wait; see `Beams.branch`."""
        beams = self.queues.beams[request_id]
        before, running = list(beams.members.values()), self.queues.running
        assert all(member in running and not member.num_remaining for member in before), "some have yet to run"
        placed = beams.branch(self.kv, choices)
        self.queues.replace(before, beams)
        return placed

    # -- one step ----------------------------------------------------------------------------------------------------

    def schedule(self, drafts: Mapping[int, Draft] | None = None, flights: int = 1) -> ScheduledBatch:
        """The next step; without sequences if no request waits or runs. `update` must be called before the next
        `schedule`.

        drafts: guesses for decoding requests, by request id; None: there are none. They get leftover capacity: guesses
        never cause another request to be preempted, to wait for blocks, or to run fewer of its own tokens. flights: the
        number of steps that will be in flight; `schedule_beside` returns the others, and there are no guesses then.
        """
        assert not self._steps, "schedule() called twice without update()"
        if flights > 1 and self._composer.divides:
            preempted = self._composer.make_room()
            step = self._composer.fill_share(flights)
        else:
            step = self._composer.new_step()
            preempted = self._composer.add_decodes(step, {} if self.kv.evicts else drafts or {})
            for request in self.queues.running:
                if request.num_scheduled_tokens == 0:
                    self._composer.take(step, request)
        if not preempted:  # a request that lost its blocks in this step must not get them back in the same step
            self._composer.admit_waiting(step, self.config.max_batch_size - self.queues.num_places)
        return self._begin(step.sequences)

    @property
    def decoding(self) -> list[int]:
        """The ids of requests that decode in the next step, in its order; guesses may be added to them."""
        return [
            r.id
            for r in self.queues.running
            if r.num_remaining == 1 and r.num_new_tokens and not r.spec.all_logits and r.beams is None
        ]

    def schedule_ahead(self) -> ScheduledBatch | None:
        """The step after the one in flight, before the tokens of that one are known; None if it depends on them.

        A device can then continue while the host handles the sampled tokens. Decoding requests begin with a
        `pending_token`, prompts continue after their chunks, and waiting requests are admitted. None also if a request
        verifies guesses, or if blocks run out, because a request that would be preempted may be about to end. Requests
        that turn out to have ended run in vain, in blocks that later steps write before they read them.
        """
        assert self._steps, "schedule_ahead() without schedule()"
        if len(self._steps) > 1:
            return None
        answering: list[ScheduledRequest] = []
        unfinished: list[ScheduledRequest] = []
        short: list[tuple[ScheduledRequest, int]] = []
        for request in self.queues.running:
            if request.draft is not None:
                return None
            known, started = len(request.tokens), request.num_started_tokens
            if started < known:
                unfinished.append(request)
            elif request.is_last_step or request.beams is not None:
                continue
            else:
                answering.append(request)
            if not self.kv.holds(request, started + 1):
                short.append((request, started + 1))
        if short and not self.kv.can_grow(short):
            return None
        step, rows = self._composer.new_step(), self._steps[0].last_rows()
        waiting = sum(request.beams is not None and not request.num_unscheduled for request in self.queues.running)
        for request, num_tokens in short:
            if not request.num_unscheduled:
                self.kv.grow(request, num_tokens)
        step.add_pending(answering, rows)
        unfinished.sort(key=lambda request: request.num_unscheduled > 1)  # because each request can run one token
        for request in unfinished:
            self._composer.take(step, request)
        taken = len(answering) + len(unfinished) + waiting + self.queues.num_unused_places
        self._composer.admit_waiting(step, self.config.max_batch_size - taken)
        return self._begin(step.sequences) if step.sequences else None

    def schedule_beside(self, flights: int) -> ScheduledBatch | None:
        """One more step while others are in flight, at most `flights` in all: it has sequences for which no step in
        flight samples a token, and the next chunks of prompts. None if there are none, if blocks run out, or if a
        request uses beam search.

        For pipelined devices, whose first parts begin a step while later parts still run the previous one: all tokens
        that a step needs must be known, and blocks are reused in the order of steps.
        """
        assert self._steps, "schedule_beside() without schedule()"
        running = self.queues.running
        if len(self._steps) >= flights or not self._composer.divides or any(request.draft for request in running):
            return None
        decoding = [(r, r.num_computed_tokens + 1) for r in running if r.num_remaining == 1 and r.num_unscheduled]
        short = [pair for pair in decoding if not self.kv.holds(*pair)]
        if short and not self.kv.can_grow(short):
            return None
        for request, num_tokens in short:
            self.kv.grow(request, num_tokens)
        step = self._composer.fill_share(flights)
        self._composer.admit_waiting(step, self.config.max_batch_size - self.queues.num_places)
        return self._begin(step.sequences) if step.sequences else None

    def update(self, outcomes: Iterable[StepOutcome]) -> list[Finished]:
        """Account for the oldest step that was scheduled: one outcome per sequence that wanted logits.

        Returns the requests that ended. Outcomes of requests that ended since `schedule` are ignored.
        """
        assert self._steps, "update() without schedule()"
        for sequence in self._steps.pop(0).sequences:
            if (request := self.queues.member(sequence)) is not None:
                request.num_computed_tokens += sequence.num_known
                request.num_scheduled_tokens -= sequence.num_known
        finished = [done for outcome in outcomes if (done := self._apply(outcome)) is not None]
        for request in self.queues.running:
            if request.draft is not None:
                request.draft = None
                self.kv.cut(request)
            if request.num_computed_tokens >= request.publish_at:
                self.kv.publish(request)
        for beams in self.queues.beams.values():
            if beams.folded and beams.running and not beams.first.num_remaining:
                before = [beams.first]
                beams.unfold(self.kv)
                self.queues.replace(before, beams)
        return finished

    def take_preempted(self) -> list[int]:
        """The ids of requests that were preempted since the last call and have not ended."""
        return self.queues.take_preempted()

    @property
    def num_preemptions(self) -> int:
        """How often a request was preempted."""
        return self.queues.num_preemptions

    @property
    def num_swaps(self) -> int:
        """How often a preempted request's KV was saved to host memory."""
        return self.queues.num_swaps

    @property
    def num_running(self) -> int:
        """How many requests have blocks."""
        return len(self.queues.running)

    @property
    def num_waiting(self) -> int:
        """How many requests have no blocks: not admitted yet, or preempted."""
        return len(self.queues.waiting)

    @property
    def under_way(self) -> list[ScheduledBatch]:
        """The steps in flight, whose `update` has not been called."""
        return list(self._steps)

    @property
    def request_ids(self) -> list[int]:
        """The ids of all waiting and running requests, in order of arrival."""
        return list(self.queues.requests)

    def has_work(self) -> bool:
        """Whether a request has not ended."""
        return bool(self.queues.requests)

    def check(self) -> None:
        """Assert every invariant: no block is lost, tables are long enough, each request is in one queue."""
        self.kv.check(self.queues.running, self.queues.waiting)
        assert self.queues.num_places <= self.config.max_batch_size
        self.queues.check()

    # -- parts of a step ---------------------------------------------------------------------------------------------

    def _begin(self, sequences: Sequence[ScheduledSequence]) -> ScheduledBatch:
        """Make a step of these sequences, with the upkeep that is due before it. An empty step is not run, so the
        upkeep stays due."""
        batch = ScheduledBatch(tuple(sequences), self.kv.upkeep())
        if sequences:
            self.kv.upkeep_done()
        self._steps.append(batch)
        return batch

    def _apply(self, outcome: StepOutcome) -> Finished | None:
        request_id, token, verdict, accepted, beam = outcome
        request = self.queues.requests.get(request_id)
        if request is not None and request.beams is not None:
            return self._apply_to_beam(request.beams, beam, verdict)
        if request is None or request.num_remaining > 0:
            return None  # aborted meanwhile, or its prompt is not fully computed
        if accepted:
            places = request.take_accepted(accepted, again=self.kv.keeps_states)
            if verdict is not Verdict.ERROR:  # after an error its blocks are zeroed instead
                self.kv.move(request, places)
        if token is not None:
            request.tokens.append(token)
        if verdict is Verdict.ERROR:
            self.kv.spoil(request)
            reason = "error"
        elif verdict is Verdict.STOP:
            reason = "stop"
        elif request.num_new_tokens >= request.spec.max_new_tokens:
            reason = "length"
        else:
            return None
        if reason != "error":
            self.kv.publish(request)
        self.queues.remove(request)
        return Finished(request.id, reason)

    def _apply_to_beam(self, beams: Beams, beam: int, verdict: Verdict) -> Finished | None:
        """Account for a beam: it waits when its logits have arrived. Logits that are not numbers end the request; else
        None."""
        member = beams.members.get(beam)
        if member is None or member.num_remaining > 0 or verdict is not Verdict.ERROR:
            return None
        for each in (*beams.members.values(), *beams.ended):
            self.kv.spoil(each)
            self.kv.close(each)
        self.queues.remove(member)
        return Finished(member.id, "error")

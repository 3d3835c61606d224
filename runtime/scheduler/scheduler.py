"""Scheduler: which tokens of which requests run in the next step, and in which KV blocks."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Mapping, Sequence

from ..batch.scheduled import Draft, Finished, ScheduledBatch, ScheduledSequence, StepOutcome, Verdict
from ..errors import CapacityError, RequestError
from ..kv.cache import KVCache, Prefix
from .beams import Beams
from .config import SchedulerConfig
from .fairness import FairShare
from .request import RequestSpec, ScheduledRequest
from .step import StepBudget

# a request preempted this often is let in again only when the worst case of all that runs with it fits
PATIENCE = 4
# tokens of a step that shares the device with others under way: fewer read the weights for too little
LEAST_SHARE = 64


class Scheduler:
    """The cycle is `schedule() -> step -> update(outcomes)`; `add` and `abort` may come at any time between calls.

    Running and waiting requests are kept in order of rank (priority, fair share, arrival). A step first runs one token
    of each decoding request, then chunks of unfinished prefills, then lets waiting requests in. Who is let in gets
    blocks for all tokens known so far, so only decodes ever ask for more; if there are none left, the request of the
    lowest rank is preempted: it loses its blocks, whose KV is kept in host memory while there is room, else computed
    again. The first in rank can always run, because it fits alone (`add` refuses what does not), so something always
    finishes.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.kv = KVCache(config.groups)
        self._requests: dict[int, ScheduledRequest] = {}
        self._running: list[ScheduledRequest] = []
        self._waiting: list[ScheduledRequest] = []
        self._beams: dict[int, Beams] = {}  # of the requests that have such, by request id
        self._shares = FairShare()
        self._arrivals = 0
        self.num_preemptions = self.num_swaps = 0  # swaps: preemptions whose KV went to host memory
        self._preempted: list[int] = []  # since they were last asked for
        self._steps: list[ScheduledBatch] = []  # scheduled and not updated, the oldest first

    # -- events ------------------------------------------------------------------------------------------------------

    def can_ever_fit(self, spec: RequestSpec) -> bool:
        """Whether the request fits in the KV cache when it runs alone."""
        return spec.beams <= self.config.max_batch_size and self.kv.too_small([spec.demand]) is None

    def validate(self, spec: RequestSpec) -> None:
        """CapacityError if a request can never fit; RequestError if it is empty or its id is in use."""
        if spec.request_id in self._requests:
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
        """Queue a request, of which the tokens `sampled` are known already. Raises as `validate`."""
        self.validate(spec)
        start = self._shares.arrive(spec.client, spec.cost)
        request = ScheduledRequest(
            tokens=[*spec.token_ids, *sampled], salt=spec.salt, use_cache=spec.use_cache,
            salt_from=spec.salt_from, own_salt=spec.own_salt, own_from=spec.own_from,
            tables=self.kv.empty_tables(len(spec.token_ids)), first_turn=spec.first_turn, spec=spec,
            arrival=self._arrivals, start=start,
        )  # fmt: skip
        self._arrivals += 1
        self._requests[spec.request_id] = request
        if spec.beams > 1:
            request.beams = self._beams[spec.request_id] = Beams(spec.beams, {0: request})
        insort(self._waiting, request, key=lambda item: item.rank)

    def abort(self, request_id: int) -> bool:
        """End a request now and free its blocks. False if there is no such request (it ended already)."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        self._remove(request)
        return True

    def branch(self, request_id: int, choices: Sequence[tuple[int, int]]) -> list[int]:
        """A request whose sequences all wait goes on with these: see `Beams.branch`."""
        beams = self._beams[request_id]
        before = list(beams.members.values())
        assert all(member in self._running and not member.num_remaining for member in before), "some have yet to run"
        placed = beams.branch(self.kv, choices)
        self._replace(before, beams)
        return placed

    # -- one step ----------------------------------------------------------------------------------------------------

    def schedule(self, drafts: Mapping[int, Draft] | None = None, flights: int = 1) -> ScheduledBatch:
        """The next step; no sequences if nothing waits or runs. `update` must follow before the next `schedule`.

        `drafts` are guesses for requests that decode, by request id. They get what room is left: no request is
        preempted or kept waiting for blocks, and none runs less of its own tokens, because of another's guesses.
        flights: so many steps are to be under way, of which `schedule_beside` gives the others; then there are no
        guesses.
        """
        assert not self._steps, "schedule() called twice without update()"
        if flights > 1 and self._divides:
            preempted = self._make_room()
            step = self._fill_share(flights)
        else:
            step = self._new_step()
            preempted = self._schedule_decodes(step, {} if self.kv.evicts else drafts or {})
            for request in self._running:
                if request.num_scheduled_tokens == 0:
                    self._take(step, request)
        if not preempted:  # whoever lost blocks in this step must not take them back in the same step
            self._admit_waiting(step, self.config.max_batch_size - len(self._running) - self._num_unused_places)
        return self._begin(step.sequences)

    @property
    def decoding(self) -> list[int]:
        """The requests that the next step samples a token for from one token, in its order: guesses may go with it."""
        return [
            r.id
            for r in self._running
            if r.num_remaining == 1 and r.num_new_tokens and not r.spec.all_logits and r.beams is None
        ]

    def schedule_ahead(self) -> ScheduledBatch | None:
        """The step after the one under way, before its tokens are known; None where that depends on them.

        A device can then go on while the host looks at what it sampled. Requests that decode begin with a
        `pending_token`, prompts go on behind their chunks, and waiting requests are let in. None where somebody
        verifies guesses, or blocks are missing: who loses its own then may be about to end. What the outcomes turn out
        to end runs in vain, into blocks that no later step reads before it has written them.
        """
        assert self._steps, "schedule_ahead() without schedule()"
        if len(self._steps) > 1:
            return None
        answering: list[ScheduledRequest] = []
        unfinished: list[ScheduledRequest] = []
        short: list[tuple[ScheduledRequest, int]] = []
        for request in self._running:
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
        step, rows = self._new_step(), self._steps[0].last_rows()
        waiting = sum(request.beams is not None and not request.num_unscheduled for request in self._running)
        for request, num_tokens in short:
            if not request.num_unscheduled:
                self.kv.grow(request, num_tokens)
        step.add_pending(answering, rows)
        unfinished.sort(key=lambda request: request.num_unscheduled > 1)  # as each request can run one token
        for request in unfinished:
            self._take(step, request)
        taken = len(answering) + len(unfinished) + waiting + self._num_unused_places
        self._admit_waiting(step, self.config.max_batch_size - taken)
        return self._begin(step.sequences) if step.sequences else None

    def schedule_beside(self, flights: int) -> ScheduledBatch | None:
        """A step more while others are under way, at most `flights` in all: of sequences of which no step samples a
        token, and of chunks of prompts behind those that run. None where there are none, blocks are missing, or
        requests go on in several ways.

        For devices that run steps one after the other but begin the next one in some of their parts while others
        still work at the one before: no token that is needed may be missing, and blocks change hands in the order of
        steps.
        """
        assert self._steps, "schedule_beside() without schedule()"
        if len(self._steps) >= flights or not self._divides or any(request.draft for request in self._running):
            return None
        decoding = [(r, r.num_computed_tokens + 1) for r in self._running if r.num_remaining == 1 and r.num_unscheduled]
        short = [pair for pair in decoding if not self.kv.holds(*pair)]
        if short and not self.kv.can_grow(short):
            return None
        for request, num_tokens in short:
            self.kv.grow(request, num_tokens)
        step = self._fill_share(flights)
        self._admit_waiting(step, self.config.max_batch_size - len(self._running) - self._num_unused_places)
        return self._begin(step.sequences) if step.sequences else None

    def update(self, outcomes: Iterable[StepOutcome]) -> list[Finished]:
        """Account for the oldest step that was scheduled: one outcome per sequence that wanted logits.

        Returns the requests that ended. Outcomes of requests that ended since `schedule` are ignored.
        """
        assert self._steps, "update() without schedule()"
        for sequence in self._steps.pop(0).sequences:
            if (request := self._member(sequence)) is not None:
                request.num_computed_tokens += sequence.num_known
                request.num_scheduled_tokens -= sequence.num_known
        finished = [done for outcome in outcomes if (done := self._apply(outcome)) is not None]
        for request in self._running:
            if request.draft is not None:
                request.draft = None
                self.kv.cut(request)
            if request.num_computed_tokens >= request.publish_at:
                self.kv.publish(request)
        for beams in self._beams.values():
            if beams.folded and beams.running and not beams.first.num_remaining:
                before = [beams.first]
                beams.unfold(self.kv)
                self._replace(before, beams)
        return finished

    def take_preempted(self) -> list[int]:
        """The requests that were preempted since the last call and have not ended."""
        preempted, self._preempted = self._preempted, []
        return [request_id for request_id in preempted if request_id in self._requests]

    @property
    def num_running(self) -> int:
        """Requests that have blocks."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that have none: not let in yet, or preempted."""
        return len(self._waiting)

    @property
    def under_way(self) -> list[ScheduledBatch]:
        """The steps that wait for their `update`."""
        return list(self._steps)

    @property
    def request_ids(self) -> list[int]:
        """Everybody who waits or runs, in order of arrival."""
        return list(self._requests)

    def has_work(self) -> bool:
        """Whether a request has not ended."""
        return bool(self._requests)

    def check(self) -> None:
        """Assert every invariant: blocks conserved, tables long enough, each request in one place."""
        self.kv.check(self._running, self._waiting)
        assert len(self._running) + self._num_unused_places <= self.config.max_batch_size
        here = [(request.id, request.beam) for request in self._running + self._waiting]
        assert len(set(here)) == len(here) and self._requests.keys() == {number for number, _ in here}
        for number, beams in self._beams.items():
            assert {beam for request, beam in here if request == number} == beams.members.keys()
            assert all(member.beams is beams and member.beam == n for n, member in beams.members.items())
            assert beams.running == all(member in self._running for member in beams.members.values())
        for queue in (self._running, self._waiting):
            assert queue == sorted(queue, key=lambda item: item.rank), "order of rank"

    @property
    def _num_unused_places(self) -> int:
        """Places in the batch that are kept for beams which are not there now."""
        return sum(beams.num_unused_places for beams in self._beams.values()) if self._beams else 0

    def _replace(self, before: Sequence[ScheduledRequest], beams: Beams) -> None:
        """Beams that run are others now."""
        for member in before:
            self._running.remove(member)
        for member in beams.members.values():
            insort(self._running, member, key=lambda item: item.rank)
        self._requests[beams.first.id] = beams.first

    # -- parts of a step ---------------------------------------------------------------------------------------------

    def _new_step(self, tokens: int | None = None) -> StepBudget:
        most = self.config.max_step_tokens
        return StepBudget(most if tokens is None else min(most, tokens), self.config.max_logit_rows, self.kv.whole)

    @property
    def _divides(self) -> bool:
        """Whether what there is to run may be divided among steps that are under way together."""
        return not (self._beams or self.kv.evicts or self.kv.whole)

    def _fill_share(self, flights: int) -> StepBudget:
        """A step of an even share of what can run now: one token of each of some requests that decode, for which there
        are blocks, and chunks of prompts, of which what waits is to fill two rounds of all flights."""
        share = -(-sum(request.num_unscheduled <= 1 for request in self._running) // flights)
        work = sum(request.num_unscheduled for request in self._running)
        work += sum(len(request.tokens) for request in self._waiting)
        step = self._new_step(max(LEAST_SHARE, share, -(-work // (2 * flights))))
        free = [request for request in self._running if request.num_unscheduled]
        for request in [request for request in free if request.num_remaining == 1][:share]:
            step.add(request, step.chunk(request))
        for request in free:
            if request.num_remaining > 1:
                self._take(step, request)
        return step

    def _member(self, sequence: ScheduledSequence) -> ScheduledRequest | None:
        """Who ran in a step; None if it has ended since."""
        if (beams := self._beams.get(sequence.request_id)) is not None:
            return beams.members.get(sequence.beam)
        return self._requests.get(sequence.request_id)

    def _begin(self, sequences: Sequence[ScheduledSequence]) -> ScheduledBatch:
        """A step of these, with all that is due before it. Without any it is not run, and all stays due."""
        batch = ScheduledBatch(tuple(sequences), self.kv.upkeep())
        if sequences:
            self.kv.upkeep_done()
        self._steps.append(batch)
        return batch

    def _schedule_decodes(self, step: StepBudget, drafts: Mapping[int, Draft]) -> bool:
        """Run one token of each request that has one left, preempting from the end of the line if blocks run out."""
        preempted = self._make_room()
        spare = StepBudget(step.tokens - len(self._running), step.logit_rows - len(self._running))
        for request in self._running:
            if request.num_remaining == 1:
                if request.id in drafts and not request.spec.all_logits and request.beams is None:
                    self._grant(request, drafts[request.id], spare)
                step.add(request, step.chunk(request))
        return preempted

    def _grant(self, request: ScheduledRequest, draft: Draft, spare: StepBudget) -> None:
        """Let the request verify as much of its draft as there is room for: tokens, logit rows, blocks of its own."""
        longest = self.kv.places_for(request.spec.max_cached_tokens)
        depth = request.spec.max_new_tokens - request.num_new_tokens - 1
        if self.kv.keeps_states:  # which follow one token after the other
            draft = draft.first_chain()
        draft = draft.limited(min(spare.tokens, spare.logit_rows, longest - request.num_tokens), depth)
        longest = request.num_tokens + len(draft)
        if not len(draft) or not self.kv.can_grow([(request, longest)], guesses=True):
            return
        self.kv.grow(request, longest, guesses=True)
        request.draft = draft
        spare.tokens -= len(draft)
        spare.logit_rows -= len(draft)

    def _make_room(self) -> bool:
        """Blocks for the next token of every request that decodes, and of the first in rank that has any to compute,
        which must go on; whether that preempted somebody."""
        preempted = False
        first = True
        index = 0
        while index < len(self._running):  # the list shrinks at its end, never before `index`
            request = self._running[index]
            index += 1
            if not request.num_remaining or (request.num_remaining != 1 and not first):
                continue
            first = False
            length = request.num_computed_tokens + 1
            while not self._can_go_on(request, length):
                last = self._running[-1]
                self._preempt(last)
                preempted = True
                if last is request or (last.beams is not None and last.beams is request.beams):
                    return True  # it is the last in rank itself
            self._go_on(request, length)
        return preempted

    def _can_go_on(self, request: ScheduledRequest, num_tokens: int) -> bool:
        if request.parted:
            return self.kv.can_go_on(request, num_tokens)
        return self.kv.can_grow([(request, num_tokens)])

    def _go_on(self, request: ScheduledRequest, num_tokens: int) -> None:
        """Give it blocks for so many tokens, which it may write. Requires `_can_go_on`."""
        if request.parted:
            self.kv.own(request)
            request.parted = False
        self.kv.grow(request, num_tokens)

    def _take(self, step: StepBudget, request: ScheduledRequest) -> None:
        """Put a chunk of an unfinished prefill into the step, as far as there are blocks for it."""
        chunk = step.chunk(request)
        if request.parted and chunk:
            if not self._can_go_on(request, request.num_started_tokens):
                return
            self._go_on(request, request.num_started_tokens)
        room = min(self.kv.room(request) - request.num_started_tokens, self.kv.limit(request))
        count = min(chunk, room)
        if count > 0:
            self.kv.grow(request, request.num_started_tokens + count)
            step.add(request, count)

    def _admit_waiting(self, step: StepBudget, places: int) -> None:
        """Let waiting requests in where there are places, strictly in order of rank: a big one is not overtaken for
        ever by small ones."""
        while self._waiting and places > 0 and step.has_room():
            request = self._waiting[0]
            if request.spec.beams > places:
                return
            cached = self.kv.cached_length(request)
            if self.kv.is_being_computed(request, cached):
                return  # wait for it rather than do it twice
            prefix = self.kv.prefix(request, cached)
            if not self._can_admit(request, prefix) or (self.kv.whole and not step.chunk(request)):
                return
            del self._waiting[0]
            self._admit(request, prefix)
            self._take(step, request)
            places -= request.spec.beams

    def _can_admit(self, request: ScheduledRequest, prefix: Prefix) -> bool:
        if request.num_preemptions >= PATIENCE:
            worst = {other.id: other.spec.demand for other in [*self._running, request]}
            return self.kv.too_small(list(worst.values())) is None and self.kv.has_room(prefix, 0)
        # one block of headroom per running request, so that it is not preempted at once
        return self.kv.has_room(prefix, len(self._running))

    def _admit(self, request: ScheduledRequest, prefix: Prefix) -> None:
        self._shares.serve(request.start)
        self.kv.open(request, prefix)
        if request.beams is not None:
            request.beams.running = True
        insort(self._running, request, key=lambda item: item.rank)

    def _preempt(self, request: ScheduledRequest) -> None:
        """Take the blocks of a running request away; it waits again, with the tokens it has sampled so far.

        What there is no room for in host memory is computed again, which prefix hits make cheap. Beams that have parted
        lose their blocks together, and are computed again.
        """
        if request.beams is not None and request.beams.has_parted:
            for member in request.beams.members.values():
                self._running.remove(member)
            request = request.beams.fold(self.kv)
            self._requests[request.id] = request
        else:
            self._running.remove(request)
            self.num_swaps += self.kv.swap_out(request)
            request.stop()
        if request.beams is not None:
            request.beams.running = False
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._preempted.append(request.id)
        insort(self._waiting, request, key=lambda item: item.rank)

    def _remove(self, request: ScheduledRequest) -> None:
        for member in [request] if request.beams is None else request.beams.members.values():
            queue = self._running if member in self._running else self._waiting
            queue.remove(member)
            self.kv.close(member)
            member.stop()
        self._shares.leave(request.spec.client, request.num_unused_tokens)
        self._beams.pop(request.id, None)
        del self._requests[request.id]

    def _apply(self, outcome: StepOutcome) -> Finished | None:
        request_id, token, verdict, accepted, beam = outcome
        request = self._requests.get(request_id)
        if request is not None and request.beams is not None:
            return self._apply_to_beam(request.beams, beam, verdict)
        if request is None or request.num_remaining > 0:
            return None  # aborted since, or not all of its prompt is computed
        if accepted:
            places = request.take_accepted(accepted, again=self.kv.keeps_states)
            if verdict is not Verdict.ERROR:  # then its blocks are zeroed instead
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
        self._remove(request)
        return Finished(request.id, reason)

    def _apply_to_beam(self, beams: Beams, beam: int, verdict: Verdict) -> Finished | None:
        """A beam waits when its logits have come, and ends nobody; logits that are not numbers end all."""
        member = beams.members.get(beam)
        if member is None or member.num_remaining > 0 or verdict is not Verdict.ERROR:
            return None
        for each in (*beams.members.values(), *beams.ended):
            self.kv.spoil(each)
            self.kv.close(each)
        self._remove(member)
        return Finished(member.id, "error")

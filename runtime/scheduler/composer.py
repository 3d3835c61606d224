"""StepComposer: what a step runs, within the budgets of tokens and logit rows and the blocks of the KV cache."""

from __future__ import annotations

from collections.abc import Mapping

from ..batch.scheduled import Draft
from ..kv.cache import KVCache, Prefix
from .config import SchedulerConfig
from .queues import Queues
from .request import ScheduledRequest
from .step import StepBudget

# a request preempted this often is let in again only when the worst case of all that runs with it fits
PATIENCE = 4
# tokens of a step that shares the device with others under way: fewer read the weights for too little
LEAST_SHARE = 64


class StepComposer:
    """Adds tokens of running requests to steps, lets waiting requests in, and preempts the last in rank for blocks."""

    def __init__(self, config: SchedulerConfig, kv: KVCache, queues: Queues) -> None:
        self.config, self.kv, self._queues = config, kv, queues

    def new_step(self, tokens: int | None = None) -> StepBudget:
        """A step without sequences, for as many tokens as a step can have, and at most `tokens` if that is not None."""
        most = self.config.max_step_tokens
        return StepBudget(most if tokens is None else min(most, tokens), self.config.max_logit_rows, self.kv.whole)

    @property
    def divides(self) -> bool:
        """Whether what there is to run may be divided among steps that are under way together."""
        return not (self._queues.beams or self.kv.evicts or self.kv.whole)

    def fill_share(self, flights: int) -> StepBudget:
        """A step of an even share of what can run now: one token of each of some requests that decode, for which there
        are blocks, and chunks of prompts, of which what waits is to fill two rounds of all flights."""
        share = -(-sum(request.num_unscheduled <= 1 for request in self._queues.running) // flights)
        work = sum(request.num_unscheduled for request in self._queues.running)
        work += sum(len(request.tokens) for request in self._queues.waiting)
        step = self.new_step(max(LEAST_SHARE, share, -(-work // (2 * flights))))
        free = [request for request in self._queues.running if request.num_unscheduled]
        for request in [request for request in free if request.num_remaining == 1][:share]:
            step.add(request, step.chunk(request))
        for request in free:
            if request.num_remaining > 1:
                self.take(step, request)
        return step

    def add_decodes(self, step: StepBudget, drafts: Mapping[int, Draft]) -> bool:
        """Run one token of each request that has one left, preempting from the end of the line if blocks run out."""
        preempted = self.make_room()
        spare = StepBudget(step.tokens - len(self._queues.running), step.logit_rows - len(self._queues.running))
        for request in self._queues.running:
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

    def make_room(self) -> bool:
        """Blocks for the next token of every request that decodes, and of the first in rank that has any to compute,
        which must go on; whether that preempted somebody."""
        preempted = False
        first = True
        index = 0
        while index < len(self._queues.running):  # the list shrinks at its end, never before `index`
            request = self._queues.running[index]
            index += 1
            if not request.num_remaining or (request.num_remaining != 1 and not first):
                continue
            first = False
            length = request.num_computed_tokens + 1
            while not self._can_go_on(request, length):
                last = self._queues.running[-1]
                self._queues.preempt(last)
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

    def take(self, step: StepBudget, request: ScheduledRequest) -> None:
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

    def admit_waiting(self, step: StepBudget, places: int) -> None:
        """Let waiting requests in where there are places, strictly in order of rank: a big one is not overtaken for
        ever by small ones."""
        while self._queues.waiting and places > 0 and step.has_room():
            request = self._queues.waiting[0]
            if request.spec.beams > places:
                return
            cached = self.kv.cached_length(request)
            if self.kv.is_being_computed(request, cached):
                return  # wait for it rather than do it twice
            prefix = self.kv.prefix(request, cached)
            if not self._can_admit(request, prefix) or (self.kv.whole and not step.chunk(request)):
                return
            self._queues.admit(prefix)
            self.take(step, request)
            places -= request.spec.beams

    def _can_admit(self, request: ScheduledRequest, prefix: Prefix) -> bool:
        if request.num_preemptions >= PATIENCE:
            worst = {other.id: other.spec.demand for other in [*self._queues.running, request]}
            return self.kv.too_small(list(worst.values())) is None and self.kv.has_room(prefix, 0)
        # one block of headroom per running request, so that it is not preempted at once
        return self.kv.has_room(prefix, len(self._queues.running))

"""StepComposer: fills a step, within the budgets of tokens and logit rows and the blocks of the KV cache."""

from __future__ import annotations

from collections.abc import Mapping

from ..batch.scheduled import Draft
from ..kv.cache import KVCache, Prefix
from .config import SchedulerConfig
from .queues import Queues
from .request import ScheduledRequest
from .step import StepBudget

# a request preempted this often is admitted again only if it fits in the worst case of all running requests
PATIENCE = 4
# least tokens of a step beside others in flight: fewer would not be worth reading the weights
LEAST_SHARE = 64


class StepComposer:
    """Adds tokens of running requests to steps, admits waiting requests, and preempts those of lowest rank when blocks
    run out."""

    def __init__(self, config: SchedulerConfig, kv: KVCache, queues: Queues) -> None:
        self.config, self.kv, self._queues = config, kv, queues

    def new_step(self, tokens: int | None = None) -> StepBudget:
        """An empty step with a budget of `tokens` tokens, at most the largest step; None: the largest step."""
        most = self.config.max_step_tokens
        return StepBudget(most if tokens is None else min(most, tokens), self.config.max_logit_rows, self.kv.whole)

    @property
    def divides(self) -> bool:
        """Whether the work may be divided among several steps in flight."""
        return not (self._queues.beams or self.kv.evicts or self.kv.whole)

    def fill_share(self, flights: int) -> StepBudget:
        """A step with an even share of the work that can run now: one token each of some decoding requests, and chunks
        of prompts. The waiting prompt tokens are spread over two rounds of all flights."""
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
        """Add one token of each request that decodes, preempting requests of lowest rank if blocks run out; whether any
        was preempted. drafts: guesses by request id, which get leftover budget."""
        preempted = self.make_room()
        spare = StepBudget(step.tokens - len(self._queues.running), step.logit_rows - len(self._queues.running))
        for request in self._queues.running:
            if request.num_remaining == 1:
                if request.id in drafts and not request.spec.all_logits and request.beams is None:
                    self._grant(request, drafts[request.id], spare)
                step.add(request, step.chunk(request))
        return preempted

    def _grant(self, request: ScheduledRequest, draft: Draft, spare: StepBudget) -> None:
        """Let the request verify as much of its draft as tokens, logit rows, and free blocks allow."""
        longest = self.kv.places_for(request.spec.max_cached_tokens)
        depth = request.spec.max_new_tokens - request.num_new_tokens - 1
        if self.kv.keeps_states:  # states need a chain of tokens
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
        """Allocate blocks for the next token of every request that decodes, and of the highest-ranked one with work,
        which must make progress; whether a request was preempted for this."""
        preempted = False
        first = True
        index = 0
        while index < len(self._queues.running):  # preemption removes entries at the end, never before `index`
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
                    return True  # the request itself has the lowest rank
            self._go_on(request, length)
        return preempted

    def _can_go_on(self, request: ScheduledRequest, num_tokens: int) -> bool:
        if request.parted:
            return self.kv.can_go_on(request, num_tokens)
        return self.kv.can_grow([(request, num_tokens)])

    def _go_on(self, request: ScheduledRequest, num_tokens: int) -> None:
        """Give the request writable blocks for `num_tokens` tokens. Requires `_can_go_on`."""
        if request.parted:
            self.kv.own(request)
            request.parted = False
        self.kv.grow(request, num_tokens)

    def take(self, step: StepBudget, request: ScheduledRequest) -> None:
        """Add a chunk of an unfinished prefill to the step, as large as free blocks allow."""
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
        """Admit waiting requests to free places, strictly in order of rank, so that small requests cannot overtake a
        big one for ever."""
        while self._queues.waiting and places > 0 and step.has_room():
            request = self._queues.waiting[0]
            if request.spec.beams > places:
                return
            cached = self.kv.cached_length(request)
            if self.kv.is_being_computed(request, cached):
                return  # wait for these blocks and do not compute them twice
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

"""Queues: the waiting and the running requests in order of rank, and the transitions between the two."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence

from ..batch.scheduled import ScheduledSequence
from ..kv.cache import KVCache, Prefix
from .beams import Beams
from .fairness import FairShare
from .request import RequestSpec, ScheduledRequest


class Queues:
    """Running and waiting requests, each kept in order of rank (priority, fair share, arrival).

    requests: all by id, in order of arrival. beams: by request id, for requests under beam search. num_preemptions,
    num_swaps: how often a running request lost its blocks, and how often its KV was saved to host memory.
    """

    def __init__(self, kv: KVCache) -> None:
        self.kv = kv
        self.requests: dict[int, ScheduledRequest] = {}
        self.running: list[ScheduledRequest] = []
        self.waiting: list[ScheduledRequest] = []
        self.beams: dict[int, Beams] = {}
        self._shares = FairShare()
        self._arrivals = 0
        self.num_preemptions = self.num_swaps = 0
        self._preempted: list[int] = []  # since the last `take_preempted`

    def arrive(self, spec: RequestSpec, sampled: Sequence[int]) -> None:
        """Queue a new request; `sampled`: tokens after its prompt that are already known."""
        start = self._shares.arrive(spec.client, spec.cost)
        request = ScheduledRequest(
            tokens=[*spec.token_ids, *sampled], salt=spec.salt, use_cache=spec.use_cache,
            salt_from=spec.salt_from, own_salt=spec.own_salt, own_from=spec.own_from,
            tables=self.kv.empty_tables(len(spec.token_ids)), first_turn=spec.first_turn, spec=spec,
            arrival=self._arrivals, start=start,
        )  # fmt: skip
        self._arrivals += 1
        self.requests[spec.request_id] = request
        if spec.beams > 1:
            request.beams = self.beams[spec.request_id] = Beams(spec.beams, {0: request})
        insort(self.waiting, request, key=lambda item: item.rank)

    def admit(self, prefix: Prefix) -> None:
        """Run the first waiting request, with the cached blocks of its prefix and new blocks for all other tokens.
        Requires room for them."""
        request = self.waiting.pop(0)
        self._shares.serve(request.start)
        self.kv.open(request, prefix)
        if request.beams is not None:
            request.beams.running = True
        insort(self.running, request, key=lambda item: item.rank)

    def preempt(self, request: ScheduledRequest) -> None:
        """Take the blocks of a running request; it waits again, with the tokens that it has sampled so far.

        KV that host memory has no room for is computed again, which prefix hits make cheap. Beams that have diverged
        lose their blocks together and are computed again.
        """
        if request.beams is not None and request.beams.has_parted:
            for member in request.beams.members.values():
                self.running.remove(member)
            request = request.beams.fold(self.kv)
            self.requests[request.id] = request
        else:
            self.running.remove(request)
            self.num_swaps += self.kv.swap_out(request)
            request.stop()
        if request.beams is not None:
            request.beams.running = False
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._preempted.append(request.id)
        insort(self.waiting, request, key=lambda item: item.rank)

    def remove(self, request: ScheduledRequest) -> None:
        """End a request with all its beams, and release their blocks."""
        for member in [request] if request.beams is None else request.beams.members.values():
            queue = self.running if member in self.running else self.waiting
            queue.remove(member)
            self.kv.close(member)
            member.stop()
        self._shares.leave(request.spec.client, request.num_unused_tokens)
        self.beams.pop(request.id, None)
        del self.requests[request.id]

    def go_on_counting(self, before: Queues) -> None:
        """Continue the counts of other queues."""
        self.num_preemptions, self.num_swaps = before.num_preemptions, before.num_swaps

    def take_preempted(self) -> list[int]:
        """The requests that were preempted since the last call and have not ended."""
        preempted, self._preempted = self._preempted, []
        return [request_id for request_id in preempted if request_id in self.requests]

    def member(self, sequence: ScheduledSequence) -> ScheduledRequest | None:
        """The request that a sequence of a step belongs to; None if it has ended since."""
        if (beams := self.beams.get(sequence.request_id)) is not None:
            return beams.members.get(sequence.beam)
        return self.requests.get(sequence.request_id)

    @property
    def num_places(self) -> int:
        """How many places in the batch are taken, by running sequences and by reservations for beams."""
        return len(self.running) + self.num_unused_places

    @property
    def num_unused_places(self) -> int:
        """How many places in the batch are reserved for beams that do not exist now."""
        return sum(beams.num_unused_places for beams in self.beams.values()) if self.beams else 0

    def replace(self, before: Sequence[ScheduledRequest], beams: Beams) -> None:
        """Replace the running members of a request, `before`, by the current members of `beams`."""
        for member in before:
            self.running.remove(member)
        for member in beams.members.values():
            insort(self.running, member, key=lambda item: item.rank)
        self.requests[beams.first.id] = beams.first

    def check(self) -> None:
        """Assert that each request, with all its beams, is in one queue, and that queues are in order of rank."""
        here = [(request.id, request.beam) for request in self.running + self.waiting]
        assert len(set(here)) == len(here) and self.requests.keys() == {number for number, _ in here}
        for number, beams in self.beams.items():
            assert {beam for request, beam in here if request == number} == beams.members.keys()
            assert all(member.beams is beams and member.beam == n for n, member in beams.members.items())
            assert beams.running == all(member in self.running for member in beams.members.values())
        for queue in (self.running, self.waiting):
            assert queue == sorted(queue, key=lambda item: item.rank), "order of rank"

"""PrefixRouter: which replica of a Ray Serve deployment gets a request, by the scores of runtime/server's Router.

Ray asks a replica now and then how it is (`record_routing_stats`, every STATS_S); what was sent to it since is counted
here. Each process that routes remembers by itself what it has sent where.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from itertools import count
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from ..server.engine.router import ReplicaLoad, Router
from .asked import Asked

STATS_S = 1.0
_KEPT_S = 1.5 * STATS_S  # a request that was sent so long ago is among what the replica says of itself
_CAPACITY = 1 << 20  # tokens of a replica's cache, until it says how many
NO_STATS: dict[str, Any] = {"waiting": 0, "sequences": 0, "slots": 1, "usage": 0.0, "tokens": _CAPACITY, "adapters": []}


class Sent:
    """Tokens that each replica was lately given to compute. now: the clock."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._sent: dict[int, deque[tuple[float, int]]] = {}

    def add(self, replica: int, tokens: int) -> None:
        """A replica gets a prompt of which it has to compute so many."""
        self._sent.setdefault(replica, deque()).append((self._now(), tokens))

    def lately(self, replica: int) -> tuple[int, int]:
        """How many prompts, and how many tokens, since a replica may have said how it is."""
        found = self._sent.get(replica, deque())
        while found and self._now() - found[0][0] > _KEPT_S:
            found.popleft()
        return len(found), sum(tokens for _, tokens in found)

    def forget(self, replica: int) -> None:
        """There is no such replica any more."""
        self._sent.pop(replica, None)


def replica_load(number: int, stats: dict[str, Any], sent: Sent, adapter: str) -> ReplicaLoad:
    """What a replica has to do: what it says of itself (see NO_STATS), and what it was sent since."""
    prompts, tokens = sent.lately(number)
    has_adapter = not adapter or adapter in stats["adapters"]
    return ReplicaLoad(
        number, stats["waiting"] + tokens, stats["sequences"] + prompts, stats["slots"], stats["usage"], has_adapter
    )


class PrefixRouter(RequestRouter):
    """Sends a request to the replica that computes it the soonest; see Router. What is in the request comes as an Asked
    among the arguments; a request without one goes to the least load."""

    def initialize_state(self, **kwargs: Any) -> None:
        """Ray has made the router. names: what requests call the model itself; others are adapters."""
        self._names: frozenset[str] = frozenset(kwargs.get("names", ()))
        self._router, self._sent = Router(), Sent()
        self._numbers: dict[ReplicaID, int] = {}
        self._next = count()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The candidates, the best first, each alone in its rank."""
        if not candidate_replicas:
            return []
        asked = _asked(pending_request)
        adapter = "" if asked.model in self._names else asked.model
        by_number = {self._number(one): one for one in candidate_replicas}
        stats = {number: NO_STATS | (one.routing_stats or {}) for number, one in by_number.items()}
        loads = [replica_load(number, stats[number], self._sent, adapter) for number in by_number]
        ranked = self._router.ranked(asked.keys, asked.length, loads)
        best, tokens = ranked[0]
        self._sent.add(best.replica, tokens)
        self._router.ran(best.replica, asked.keys, stats[best.replica]["tokens"])
        return [[by_number[load.replica]] for load, _ in ranked]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Ray says which replicas there are now."""
        there = {one.replica_id for one in replicas}
        for gone in [one for one in self._numbers if one not in there]:
            self._forget(gone)
        super().update_replicas(replicas)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """A replica has ended, and its cache with it."""
        self._forget(replica_id)
        super().on_replica_actor_died(replica_id)

    def _forget(self, replica_id: ReplicaID) -> None:
        number = self._numbers.pop(replica_id, None)
        if number is not None:
            self._router.forget(number)
            self._sent.forget(number)

    def _number(self, replica: RunningReplica) -> int:
        if replica.replica_id not in self._numbers:
            self._numbers[replica.replica_id] = next(self._next)
        return self._numbers[replica.replica_id]


def _asked(request: PendingRequest | None) -> Asked:
    found = () if request is None else request.args
    return next((one for one in found if isinstance(one, Asked)), Asked())

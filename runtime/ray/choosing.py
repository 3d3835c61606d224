"""ReplicaChooser: which replica of a deployment gets a request, by the scores of runtime/server's Router.

Replicas say now and then how they are, every STATS_S; what was sent to one since is counted here. Each process that
routes remembers by itself what it has sent where.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from itertools import count
from typing import Any, Generic, TypeVar

from ..server.engine.router import ReplicaLoad, Router
from .asked import AskedOfReplica

STATS_S = 1.0
_KEPT_S = 1.5 * STATS_S  # a request that was sent so long ago is among what the replica says of itself
_CAPACITY = 1 << 20  # tokens of a replica's cache, until it says how many
NO_STATS: dict[str, Any] = {
    "waiting": 0,
    "sequences": 0,
    "slots": 1,
    "usage": 0.0,
    "tokens": _CAPACITY,
    "ready": True,
    "adapters": [],
}
Name = TypeVar("Name", bound=Hashable)


class ReplicaChooser(Generic[Name]):
    """Ranks replicas, by the names that they have, for requests. models: what requests call the model itself, other
    names are adapters'. now: the clock."""

    def __init__(self, models: Sequence[str], now: Callable[[], float] = time.monotonic) -> None:
        self._models = frozenset(models)
        self._router, self._sent = Router(), Sent(now)
        self._numbers: dict[Name, int] = {}
        self._next = count()

    def ranked(self, asked: AskedOfReplica, replicas: Mapping[Name, Mapping[str, Any]]) -> list[Name]:
        """The replicas, each with what it last said of itself, the best first, which is taken to get the request."""
        adapter = "" if asked.model in self._models else asked.model
        names = {self._number(name): name for name in replicas}
        stats = {number: NO_STATS | dict(replicas[name]) for number, name in names.items()}
        loads = [replica_load(number, stats[number], self._sent, adapter) for number in names]
        found = self._router.ranked(asked.keys, asked.length, loads)
        found.sort(key=lambda one: not stats[one[0].replica]["ready"])  # an engine that is started again comes last
        best, tokens = found[0]
        self._sent.add(best.replica, tokens)
        self._router.ran(best.replica, asked.keys, stats[best.replica]["tokens"])
        return [names[load.replica] for load, _ in found]

    def keep(self, names: Collection[Name]) -> None:
        """These replicas there are; others that were are gone, with their caches."""
        for name in [name for name in self._numbers if name not in names]:
            self.forget(name)

    def forget(self, name: Name) -> None:
        """A replica has ended."""
        number = self._numbers.pop(name, None)
        if number is not None:
            self._router.forget(number)
            self._sent.forget(number)

    def _number(self, name: Name) -> int:
        if name not in self._numbers:
            self._numbers[name] = next(self._next)
        return self._numbers[name]


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

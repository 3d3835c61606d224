"""ReplicaChooser: which replica of a deployment gets a request, by the scores of runtime/server's Router.

Replicas report their load every STATS_S seconds; requests sent to a replica since its report are counted here. Each
routing process remembers only the requests that it has sent itself.
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
_KEPT_S = 1.5 * STATS_S  # after so many seconds a sent request is included in the replica's report
_CAPACITY = 1 << 20  # tokens in a replica's cache, until the replica reports the number
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
    """Ranks replicas, known by their names, for a request. models: names of the model itself; any other model name is
    an adapter. now: the clock, in seconds."""

    def __init__(self, models: Sequence[str], now: Callable[[], float] = time.monotonic) -> None:
        self._models = frozenset(models)
        self._router, self._sent = Router(), Sent(now)
        self._numbers: dict[Name, int] = {}
        self._next = count()

    def ranked(self, asked: AskedOfReplica, replicas: Mapping[Name, Mapping[str, Any]]) -> list[Name]:
        """The names of the replicas, the best first; the request is counted as sent to it. replicas: the last report of
        each."""
        adapter = "" if asked.model in self._models else asked.model
        names = {self._number(name): name for name in replicas}
        stats = {number: NO_STATS | dict(replicas[name]) for number, name in names.items()}
        loads = [replica_load(number, stats[number], self._sent, adapter) for number in names]
        found = self._router.ranked(asked.keys, asked.length, loads)
        found.sort(key=lambda one: not stats[one[0].replica]["ready"])  # an engine that is restarting comes last
        best, tokens = found[0]
        self._sent.add(best.replica, tokens)
        self._router.ran(best.replica, asked.keys, stats[best.replica]["tokens"])
        return [names[load.replica] for load, _ in found]

    def keep(self, names: Collection[Name]) -> None:
        """Forget all replicas but these."""
        for name in [name for name in self._numbers if name not in names]:
            self.forget(name)

    def forget(self, name: Name) -> None:
        """Forget a replica that has ended, and its cache."""
        number = self._numbers.pop(name, None)
        if number is not None:
            self._router.forget(number)
            self._sent.forget(number)

    def _number(self, name: Name) -> int:
        if name not in self._numbers:
            self._numbers[name] = next(self._next)
        return self._numbers[name]


class Sent:
    """Prompts recently sent to each replica, and how many of their tokens it has to compute. now: the clock, in
    seconds."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._sent: dict[int, deque[tuple[float, int]]] = {}

    def add(self, replica: int, tokens: int) -> None:
        """Count a prompt sent to a replica, which has to compute so many of its tokens."""
        self._sent.setdefault(replica, deque()).append((self._now(), tokens))

    def lately(self, replica: int) -> tuple[int, int]:
        """(prompts, tokens) sent to a replica that its last report may not include."""
        found = self._sent.get(replica, deque())
        while found and self._now() - found[0][0] > _KEPT_S:
            found.popleft()
        return len(found), sum(tokens for _, tokens in found)

    def forget(self, replica: int) -> None:
        """Forget a replica that has ended."""
        self._sent.pop(replica, None)


def replica_load(number: int, stats: dict[str, Any], sent: Sent, adapter: str) -> ReplicaLoad:
    """A replica's load: its last report (see NO_STATS) plus the requests sent since."""
    prompts, tokens = sent.lately(number)
    has_adapter = not adapter or adapter in stats["adapters"]
    return ReplicaLoad(
        number, stats["waiting"] + tokens, stats["sequences"] + prompts, stats["slots"], stats["usage"], has_adapter
    )

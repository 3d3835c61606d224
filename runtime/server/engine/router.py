"""Router: which replica of an engine computes a prompt.

A prompt costs what is not in a replica's prefix cache. What waits there already comes first, and sequences that run
slow a step down; the replica of the least sum gets the prompt, so that a conversation stays where its beginning is as
long as that is not much busier than the others (as NVIDIA Dynamo's KV router and SGLang's cache-aware router weigh it).
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from .messages import Submit

CHUNK = 32  # tokens that are looked up together
MOST_CHUNKS = 512  # of a prompt; what comes behind them tells conversations apart no better
SEQUENCE = 16  # tokens: what a sequence that runs delays a prompt
QUEUED = 256  # tokens: what a sequence beyond a full batch does
COLD_ADAPTER = 256  # tokens: what an adapter costs that has to be put into a slot first
CROWDED = 0.9  # share of KV blocks in use above which a prompt may push another out
CROWDED_COST = 1024  # tokens


@dataclass(frozen=True)
class ReplicaLoad:
    """What a replica has to do. waiting: tokens of prompts of which nothing has come yet. sequences: those that run or
    wait. slots: how many run at once. usage: share of KV blocks in use, 0 to 1. has_adapter: whether the prompt's
    adapter, if any, is in one of its slots, or on its way there. decoding: of the sequences, those that go on by a
    token in each step."""

    replica: int
    waiting: int
    sequences: int
    slots: int
    usage: float
    has_adapter: bool
    decoding: int = 0

    def cost(self, tokens: int) -> int:
        """What `tokens` tokens that it has to compute cost there, in tokens."""
        queued = max(self.sequences + 1 - self.slots, 0)
        found = tokens + self.waiting + SEQUENCE * self.sequences + QUEUED * queued
        return found + COLD_ADAPTER * (not self.has_adapter) + CROWDED_COST * (self.usage > CROWDED)


def prefix_keys(submit: Submit) -> list[bytes]:
    """A digest of each beginning of a prompt that is whole chunks long; those of prompts that may not share cached
    blocks differ."""
    adapter = f"{submit.adapter}*{submit.adapter_scale}" if submit.adapter else ""
    return chunk_keys(submit.salt + b"\0" + adapter.encode(), array("i", submit.prompt).tobytes())


def chunk_keys(seed: bytes, content: bytes) -> list[bytes]:
    """A digest of each beginning of `content` that is whole chunks of CHUNK times 4 bytes long, behind `seed`."""
    digest, keys, size = blake2b(seed, digest_size=16), list[bytes](), CHUNK * 4
    view = memoryview(content)
    for end in range(size, min(len(view), MOST_CHUNKS * size) + 1, size):
        digest.update(view[end - size : end])
        keys.append(digest.digest())
    return keys


class Router:
    """Remembers which beginnings of prompts each replica has computed, as many as its cache may hold: the least
    recently used are forgotten first."""

    def __init__(self) -> None:
        self._seen = defaultdict[int, OrderedDict[bytes, None]](OrderedDict)

    def choose(self, keys: Sequence[bytes], length: int, loads: Sequence[ReplicaLoad]) -> tuple[ReplicaLoad, int]:
        """The replica for a prompt of `length` tokens, and how many of them it has to compute; among equals the one
        with the fewest sequences."""
        return self.ranked(keys, length, loads)[0]

    def ranked(self, keys: Sequence[bytes], length: int, loads: Sequence[ReplicaLoad]) -> list[tuple[ReplicaLoad, int]]:
        """All of them as `choose` has one, the best first; equals in the order in which they are given."""
        found = [(load, max(length - CHUNK * self._matched(load.replica, keys), 1)) for load in loads]
        return sorted(found, key=lambda one: (one[0].cost(one[1]), one[0].sequences))

    def ran(self, replica: int, keys: Sequence[bytes], capacity: int) -> None:
        """A replica computes a prompt. capacity: tokens that its cache holds."""
        seen = self._seen[replica]
        for key in reversed(keys):  # the beginning last: of a prompt its end is forgotten first
            seen[key] = None
            seen.move_to_end(key)
        while len(seen) > max(capacity // CHUNK, 1):
            seen.popitem(last=False)

    def forget(self, replica: int) -> None:
        """A replica has lost its cache."""
        self._seen.pop(replica, None)

    def _matched(self, replica: int, keys: Sequence[bytes]) -> int:
        """How many chunks of a prompt a replica has."""
        seen, low, high = self._seen[replica], 0, len(keys)
        while low < high:  # who has a chunk has those before it
            middle = (low + high + 1) // 2
            low, high = (middle, high) if keys[middle - 1] in seen else (low, middle - 1)
        return low

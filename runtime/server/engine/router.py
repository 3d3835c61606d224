"""Router: which replica of an engine computes a prompt.

A prompt's cost on a replica is the number of its tokens that are not in the replica's prefix cache, plus the tokens
that wait there already, plus a penalty for running sequences, which slow steps down. The replica with the least cost
gets the prompt, so a conversation stays where its prefix is unless that replica is much busier than the others (as in
NVIDIA Dynamo's KV router and SGLang's cache-aware router).
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from .messages import Submit

CHUNK = 32  # tokens per key of a prefix
MOST_CHUNKS = 512  # of a prompt; later chunks hardly help to distinguish conversations
SEQUENCE = 16  # cost in tokens of a running sequence
QUEUED = 256  # cost in tokens of a sequence beyond a full batch
COLD_ADAPTER = 256  # cost in tokens of an adapter that must be loaded into a slot first
CROWDED = 0.9  # share of KV blocks in use above which a prompt may preempt another
CROWDED_COST = 1024  # tokens


@dataclass(frozen=True)
class ReplicaLoad:
    """The load of a replica. waiting: tokens to compute of prompts without output so far. sequences: that run or wait.
    slots: how many run at once. usage: share of KV blocks in use, 0 to 1. has_adapter: whether the prompt's adapter, if
    any, is in one of its slots or being loaded. decoding: how many of the sequences decode."""

    replica: int
    waiting: int
    sequences: int
    slots: int
    usage: float
    has_adapter: bool
    decoding: int = 0

    def cost(self, tokens: int) -> int:
        """The cost, in tokens, of a prompt of which `tokens` tokens have to be computed on this replica."""
        queued = max(self.sequences + 1 - self.slots, 0)
        found = tokens + self.waiting + SEQUENCE * self.sequences + QUEUED * queued
        return found + COLD_ADAPTER * (not self.has_adapter) + CROWDED_COST * (self.usage > CROWDED)


def prefix_keys(submit: Submit) -> list[bytes]:
    """A digest of each prefix of a prompt that consists of whole chunks. Prompts that may not share cached blocks have
    different digests."""
    adapter = f"{submit.adapter}*{submit.adapter_scale}" if submit.adapter else ""
    return chunk_keys(submit.salt + b"\0" + adapter.encode(), array("i", submit.prompt).tobytes())


def chunk_keys(seed: bytes, content: bytes) -> list[bytes]:
    """A digest of `seed` and each prefix of `content` that consists of whole chunks of CHUNK times 4 bytes."""
    digest, keys, size = blake2b(seed, digest_size=16), list[bytes](), CHUNK * 4
    view = memoryview(content)
    for end in range(size, min(len(view), MOST_CHUNKS * size) + 1, size):
        digest.update(view[end - size : end])
        keys.append(digest.digest())
    return keys


class Router:
    """Remembers which prefixes of prompts each replica has computed, as many as its cache can hold; the least recently
    used are dropped first."""

    def __init__(self) -> None:
        self._seen = defaultdict[int, OrderedDict[bytes, None]](OrderedDict)

    def choose(self, keys: Sequence[bytes], length: int, loads: Sequence[ReplicaLoad]) -> tuple[ReplicaLoad, int]:
        """The replica for a prompt of `length` tokens, and how many of them it has to compute. Among equal costs, the
        replica with the fewest sequences is taken."""
        return self.ranked(keys, length, loads)[0]

    def ranked(self, keys: Sequence[bytes], length: int, loads: Sequence[ReplicaLoad]) -> list[tuple[ReplicaLoad, int]]:
        """All replicas, each as in `choose`, the best first; equals keep the order of `loads`."""
        found = [(load, max(length - CHUNK * self._matched(load.replica, keys), 1)) for load in loads]
        return sorted(found, key=lambda one: (one[0].cost(one[1]), one[0].sequences))

    def ran(self, replica: int, keys: Sequence[bytes], capacity: int) -> None:
        """Record that a replica computes a prompt. capacity: of its cache, in tokens."""
        seen = self._seen[replica]
        for key in reversed(keys):  # the first chunk last, so that the end of a prompt is dropped first
            seen[key] = None
            seen.move_to_end(key)
        while len(seen) > max(capacity // CHUNK, 1):
            seen.popitem(last=False)

    def forget(self, replica: int) -> None:
        """Forget the prefixes of a replica whose cache is gone."""
        self._seen.pop(replica, None)

    def _matched(self, replica: int, keys: Sequence[bytes]) -> int:
        """How many chunks of a prompt are in a replica's cache."""
        seen, low, high = self._seen[replica], 0, len(keys)
        while low < high:  # a replica with a chunk has all chunks before it
            middle = (low + high + 1) // 2
            low, high = (middle, high) if keys[middle - 1] in seen else (low, middle - 1)
        return low

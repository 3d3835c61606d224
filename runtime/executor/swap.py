"""Places of the KV blocks of preempted requests in host memory, which has the layout of the cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..format.kv import KVMemory


def copies(
    cache: KVMemory, host: KVMemory, group: int, pairs: Sequence[tuple[int, int]]
) -> Iterator[tuple[int, int, int]]:
    """(byte offset in the cache, byte offset in host memory, size in bytes) for pairs of a block and a host slot;
    neighbours are one copy."""
    for block, slot, count in runs(pairs):
        there = host.block_places(group, slot)
        for (here, nbytes), (at, _) in zip(cache.block_places(group, block), there, strict=True):
            yield here, at, nbytes * count


def runs(pairs: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """(first, second, count) for each run of pairs that are consecutive on both sides."""
    start = 0
    for index in range(1, len(pairs) + 1):
        (first, second), length = pairs[start], index - start
        if index == len(pairs) or pairs[index] != (first + length, second + length):
            yield first, second, length
            start = index

"""The memory plan: one static arena, buffers with disjoint lifetimes share bytes.

Sizes and offsets are in bytes per token, so that one plan serves every number of tokens. Greedy by size, as in TFLite
(Pisarchyk and Lee 2020): the largest buffers first, each at the lowest offset that no buffer alive at the same time
uses.
"""

from __future__ import annotations

from collections.abc import Iterable

from .builder import VirtualBuffer

ALIGN = 64


def plan(buffers: Iterable[VirtualBuffer]) -> tuple[dict[str, int], int]:
    """(offset by buffer name, arena bytes per token)."""
    placed: list[tuple[int, int, VirtualBuffer]] = []  # (start, end, buffer)
    offsets: dict[str, int] = {}
    for buffer in sorted(buffers, key=lambda b: (-b.row_bytes, b.first, int(b.name[1:]))):
        size = -(-max(buffer.row_bytes, 1) // ALIGN) * ALIGN
        start = 0
        for low, high, other in sorted(placed, key=lambda p: p[0]):
            overlaps = other.first <= buffer.last and buffer.first <= other.last
            if overlaps and low < start + size and start < high:
                start = high
        placed.append((start, start + size, buffer))
        offsets[buffer.name] = start
    return offsets, max((end for _, end, _ in placed), default=ALIGN)

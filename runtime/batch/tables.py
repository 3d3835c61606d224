"""Block tables without a scheduler, for steps that are run to be timed."""

from __future__ import annotations

from collections.abc import Sequence

from ..kv.config import GroupConfig


def plain_tables(groups: Sequence[GroupConfig], num_tokens: int, *before: int) -> tuple[tuple[int, ...], ...]:
    """Tables for so many tokens in each KV group; `before` are the lengths of sequences that have the blocks before.

    Where there are no more blocks they begin anew, on which the time does not depend.
    """
    tables = []
    for group in groups:
        first = sum(-(-length // group.block_size) for length in before)
        numbers = range(first, first + -(-num_tokens // group.block_size))
        tables.append(tuple(number % group.num_blocks for number in numbers))
    return tuple(tables)

"""Block tables made without a scheduler, for steps that are only timed."""

from __future__ import annotations

from collections.abc import Sequence

from ..kv.config import GroupConfig


def plain_tables(groups: Sequence[GroupConfig], num_tokens: int, *before: int) -> tuple[tuple[int, ...], ...]:
    """A table of blocks for `num_tokens` tokens in each KV group; `before`: the lengths in tokens of the sequences that
    use the blocks before these.

    When the blocks run out, the numbers start again at 0, which does not change the time of a step.
    """
    tables = []
    for group in groups:
        first = sum(-(-length // group.block_size) for length in before)
        numbers = range(first, first + -(-num_tokens // group.block_size))
        tables.append(tuple(number % group.num_blocks for number in numbers))
    return tuple(tables)

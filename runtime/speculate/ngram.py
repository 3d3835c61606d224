"""Prompt lookup: what followed the last time that the text ended like this ("inference with reference", Yang et al.
2023; prompt lookup decoding, Saxena 2023)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..scheduler.batch import Draft
from .drafter import Proposal, Wish, chain_chances

LONGEST, SHORTEST = 4, 2  # tokens of the ending that is looked up, longest first
MAX_GUESSES = 16


@dataclass(slots=True)
class _Index:
    """A request's tokens, and where each n-gram of them ended: the position behind it, for the last two places."""

    tokens: list[int]
    after: dict[tuple[int, ...], tuple[int, int]] = field(default_factory=dict)
    indexed: int = 0

    def grow(self, fresh: Sequence[int]) -> None:
        self.tokens += fresh
        for end in range(self.indexed + 1, len(self.tokens) + 1):
            for size in range(SHORTEST, min(LONGEST, end) + 1):
                gram = tuple(self.tokens[end - size : end])
                self.after[gram] = (end, self.after.get(gram, (0, 0))[0])
        self.indexed = len(self.tokens)

    def lookup(self, count: int) -> list[int]:
        """What followed the text's ending the last time; the ending itself is its own last place."""
        for size in range(min(LONGEST, len(self.tokens)), SHORTEST - 1, -1):
            before = self.after[tuple(self.tokens[-size:])][1]
            if before:
                return self._from(before, count)
        return []

    def _from(self, start: int, count: int) -> list[int]:
        """`count` tokens from `start` on; behind the end of the text it goes on with what it has just given."""
        period = len(self.tokens) - start
        return [self.tokens[start + step % period] for step in range(count)]


class NgramDrafter:
    """Guesses chains out of each request's own prompt and output. Costs no step of any model."""

    name = "ngram"
    first_rate = 0.6

    def __init__(self) -> None:
        self._indices: dict[int, _Index] = {}

    def propose(self, wishes: Sequence[Wish]) -> dict[int, Proposal]:
        found: dict[int, Proposal] = {}
        for wish in wishes:
            generation = wish.generation
            index = self._indices.get(generation.request_id)
            if index is None:
                index = self._indices[generation.request_id] = _Index([])
                index.grow(generation.prompt)
            index.grow(generation.token_ids[len(index.tokens) - len(generation.prompt) :])
            guesses = index.lookup(min(wish.count, MAX_GUESSES))
            if guesses:
                found[generation.request_id] = Proposal(Draft.chain(guesses), chain_chances(len(guesses), wish.rate))
        return found

    def observe(self, rows: Mapping[int, int], batch_size: int) -> None:
        """Nothing to see: the text is enough."""

    def forget(self, request_id: int) -> None:
        self._indices.pop(request_id, None)

    def close(self) -> None:
        self._indices.clear()

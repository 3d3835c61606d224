"""Prompt lookup: what followed the last time that the text ended like this ("inference with reference", Yang et al.
2023; prompt lookup decoding, Saxena 2023)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..scheduler.batch import Draft
from .drafter import Proposal, Wish, chain_chances

GRAM = 3  # tokens of the ending that is looked up
MAX_GUESSES = 16


@dataclass(slots=True)
class _Index:
    """A request's tokens, and where each n-gram before its ending last ended: the position behind it."""

    tokens: list[int]
    after: dict[tuple[int, int, int], int] = field(default_factory=dict)
    indexed: int = GRAM

    def grow(self, fresh: Sequence[int]) -> None:
        """Take new tokens. The ending itself is not indexed: it would be found instead of an earlier place."""
        tokens, after = self.tokens, self.after
        tokens += fresh
        for end in range(self.indexed, len(tokens)):
            after[tokens[end - 3], tokens[end - 2], tokens[end - 1]] = end
        self.indexed = max(len(tokens), GRAM)

    def lookup(self, count: int) -> list[int]:
        """What followed the text's ending the last time; behind the end it goes on with what it has just given."""
        if len(self.tokens) < GRAM:
            return []
        start = self.after.get((self.tokens[-3], self.tokens[-2], self.tokens[-1]))
        if start is None:
            return []
        period = len(self.tokens) - start
        return [self.tokens[start + step % period] for step in range(count)]


class NgramDrafter:
    """Guesses chains out of each request's own prompt and output. Costs no step of any model."""

    name = "ngram"
    first_rate = 0.6
    observes = False

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

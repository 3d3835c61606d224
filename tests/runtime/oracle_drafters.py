"""Drafters for tests: one that knows the fake model's next tokens, and one that always guesses the same."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from icc.runtime.batch.scheduled import Draft
from icc.runtime.loop.fake import context_hash
from icc.runtime.speculate.drafter import Drafter, Proposal, Wish

VOCAB = 258


class Oracle(Drafter):
    """Random trees of guesses; a guess is the fake model's next token with probability `right`."""

    name, first_rate = "oracle", 0.5

    def __init__(self, right: float, seed: int = 0, rule: Callable[..., int] = context_hash) -> None:
        self._source, self._right, self._rule = random.Random(seed), right, rule

    def propose(self, wishes: Sequence[Wish]) -> dict[int, Proposal]:
        found = {}
        for wish in wishes:
            prefixes = [[*wish.generation.prompt, *wish.generation.token_ids]]
            guesses: list[int] = []
            parents: list[int] = []
            for _ in range(self._source.randrange(9)):
                parent = self._source.randrange(len(prefixes)) - 1
                right = self._source.random() < self._right
                guess = self._rule(prefixes[parent + 1], VOCAB) if right else self._source.randrange(VOCAB)
                if (parent, guess) not in zip(parents, guesses, strict=True):
                    guesses.append(guess)
                    parents.append(parent)
                    prefixes.append([*prefixes[parent + 1], guess])
            found[wish.generation.request_id] = Proposal(Draft(tuple(guesses), tuple(parents)), (0.5,) * len(guesses))
        return found


class Fixed(Drafter):
    """Guesses the same tree after every token."""

    name, first_rate = "fixed", 0.5

    def __init__(self, tree: Draft) -> None:
        self._tree = tree

    def propose(self, wishes: Sequence[Wish]) -> dict[int, Proposal]:
        return {wish.generation.request_id: Proposal(self._tree, (0.5,) * len(self._tree)) for wish in wishes}

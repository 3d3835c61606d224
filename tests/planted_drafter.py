"""Drafters that know the right tokens, for tests of verifying trees of guesses and moving their KV."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from icc.runtime.batch.scheduled import Draft
from icc.runtime.requests.generation import Generation
from icc.runtime.speculate.drafter import Drafter, Proposal, Wish


class PlantedDrafter(Drafter):
    """Guesses the same shape of tree after every token: `tree` builds it from a wrong token and the next two right
    ones.

    truth: the tokens after each prompt; after their end, tokens are 5.
    """

    name, first_rate = "planted", 0.5

    def __init__(self, truth: Mapping[tuple[int, ...], Sequence[int]], tree: Callable[[int, int, int], Draft]) -> None:
        self._truth, self._tree = truth, tree

    def propose(self, wishes: Any) -> dict[int, Proposal]:
        found = {}
        for wish in wishes:
            right = [*self._truth[wish.generation.prompt][len(wish.generation.token_ids) :], 5, 5]
            draft = self._tree((right[0] + 1) % 100, right[0], right[1])
            found[wish.generation.request_id] = Proposal(draft, (0.5,) * len(draft))
        return found


class TreeDrafter(Drafter):
    """Random trees of guesses. truth: gives the tokens of a request; right: the share of guesses that follow it."""

    name, first_rate = "trees", 0.5

    def __init__(self, truth: Callable[[Generation], Sequence[int]], right: float, seed: int = 0) -> None:
        self._truth, self._right, self._source = truth, right, random.Random(seed)

    def propose(self, wishes: Sequence[Wish]) -> dict[int, Proposal]:
        found = {}
        for wish in wishes:
            following = self._truth(wish.generation)[len(wish.generation.token_ids) :]
            guesses: list[int] = []
            parents: list[int] = []
            depths: list[int] = []
            for _ in range(self._source.randrange(12)):
                parent = self._source.randrange(len(depths) + 1) - 1
                depth = 0 if parent < 0 else depths[parent] + 1
                right = depth < len(following) and self._source.random() < self._right
                guess = int(following[depth]) if right else self._source.randrange(3, 100)
                if (parent, guess) not in zip(parents, guesses, strict=True):
                    guesses.append(guess), parents.append(parent), depths.append(depth)
            found[wish.generation.request_id] = Proposal(Draft(tuple(guesses), tuple(parents)), (0.5,) * len(guesses))
        return found

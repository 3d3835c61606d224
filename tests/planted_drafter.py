"""A drafter that knows what comes, for tests of how trees of guesses are verified and moved."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from icc.runtime.batch.scheduled import Draft
from icc.runtime.speculate.drafter import Drafter, Proposal


class PlantedDrafter(Drafter):
    """Behind every token the same shape of tree: `tree` makes it of a wrong token and the two that come next.

    truth: the tokens behind each prompt; tokens behind their end are 5.
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

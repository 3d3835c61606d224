"""Chain or tree: which guesses a drafter makes that has a first and a second choice behind each token of a chain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..batch.scheduled import Draft
from .drafter import Proposal

MEMORY = 0.05  # weight of the newest miss in the share of second choices


class PlannedGuess(NamedTuple):
    """A choice behind a chain of `depth - 1` first choices. second: it is no first one, and nothing follows it."""

    depth: int
    second: bool
    chance: float


def best_guesses(rate: float, second: float, count: int) -> list[PlannedGuess]:
    """The `count` likeliest guesses, best first, each behind those that it follows.

    rate: how probable a first choice is right where all before are. second: the share of wrong ones whose second choice
    is right. With 0 it is a chain.
    """
    chain = [PlannedGuess(depth, False, rate**depth) for depth in range(1, count + 1)]
    seconds = [PlannedGuess(depth, True, rate ** (depth - 1) * (1 - rate) * second) for depth in range(1, count + 1)]
    return sorted([*chain, *(guess for guess in seconds if guess.chance > 0)], key=lambda guess: -guess.chance)[:count]


def proposal(guesses: Sequence[PlannedGuess], choices: Sequence[Sequence[int]]) -> Proposal:
    """The guesses as a draft, as far as there are choices: those of depth d are choices[d - 1], first and second."""
    tokens, parents, chances = list[int](), list[int](), list[float]()
    places = {0: -1}  # depth -> the guess that is the first choice there
    for depth, is_second, chance in guesses:
        if depth > len(choices) or len(choices[depth - 1]) <= is_second or depth - 1 not in places:
            continue
        if not is_second:
            places[depth] = len(tokens)
        tokens.append(choices[depth - 1][is_second])
        parents.append(places[depth - 1])
        chances.append(chance)
    return Proposal(Draft(tuple(tokens), tuple(parents)), tuple(chances))


class SecondChoices:
    """How often the second choice is right where the first is wrong, over all requests."""

    def __init__(self) -> None:
        self.share = 0.0

    def learn(self, choices: Sequence[Sequence[int]], said: Sequence[int]) -> None:
        """The text went on with `said` where these were the choices: the first miss decides."""
        for (first, *rest), token in zip(choices, said, strict=False):
            if first != token:
                if rest:
                    self.share += MEMORY * ((rest[0] == token) - self.share)
                return

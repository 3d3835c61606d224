"""Chain or tree: selects the guesses of a drafter that has a first and a second choice after each token of a chain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..batch.scheduled import Draft
from .drafter import Proposal

MEMORY = 0.05  # weight of the newest miss in the share of right second choices


class PlannedGuess(NamedTuple):
    """A choice after a chain of `depth - 1` first choices. second: whether it is a second choice, which no guess
    follows."""

    depth: int
    second: bool
    chance: float


def best_guesses(rate: float, second: float, count: int) -> list[PlannedGuess]:
    """The `count` likeliest guesses, best first, each after the guesses that it follows.

    rate: the probability that a first choice is right if all before are. second: the share of wrong first choices whose
    second choice is right; with 0 the result is a chain.
    """
    chain = [PlannedGuess(depth, False, rate**depth) for depth in range(1, count + 1)]
    seconds = [PlannedGuess(depth, True, rate ** (depth - 1) * (1 - rate) * second) for depth in range(1, count + 1)]
    return sorted([*chain, *(guess for guess in seconds if guess.chance > 0)], key=lambda guess: -guess.chance)[:count]


def proposal(guesses: Sequence[PlannedGuess], choices: Sequence[Sequence[int]]) -> Proposal:
    """The guesses as a draft, as far as there are choices; choices[d - 1] are the first and second choice at depth
    d."""
    tokens, parents, chances = list[int](), list[int](), list[float]()
    places = {0: -1}  # depth -> index of the guess that is the first choice there
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
    """Measures how often the second choice is right if the first is wrong, over all requests."""

    def __init__(self) -> None:
        self.share = 0.0

    def learn(self, choices: Sequence[Sequence[int]], said: Sequence[int]) -> None:
        """Update the share, given that the text continued with `said` after these choices: the first miss counts."""
        for (first, *rest), token in zip(choices, said, strict=False):
            if first != token:
                if rest:
                    self.share += MEMORY * ((rest[0] == token) - self.share)
                return

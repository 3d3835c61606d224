"""Chain or tree, by how often second choices are right: the guesses that are likeliest to be accepted on average."""

from __future__ import annotations

from itertools import combinations
from types import SimpleNamespace
from typing import Any, cast

import pytest
from icc.runtime.batch.scheduled import Draft, ScheduledSequence
from icc.runtime.speculate.draft_layer import _rows_of
from icc.runtime.speculate.siblings import MEMORY, PlannedGuess, SecondChoices, best_guesses, proposal


def most(rate: float, second: float, count: int) -> float:
    """The largest sum of chances of `count` guesses, by trying all valid combinations."""
    best = 0.0
    for length in range(count + 1):
        beside = [rate**depth * (1 - rate) * second for depth in range(length + 1)]
        for chosen in combinations(beside, count - length) if count - length <= len(beside) else ():
            best = max(best, sum(rate ** (depth + 1) for depth in range(length)) + sum(chosen))
    return best


@pytest.mark.parametrize("rate", [0.1, 0.3, 0.5, 0.8, 0.95])
@pytest.mark.parametrize("second", [0.0, 0.2, 0.6, 1.0])
def test_no_other_guesses_are_likelier(rate: float, second: float) -> None:
    for count in range(1, 8):
        found = best_guesses(rate, second, count)
        assert len(found) == count
        assert sum(guess.chance for guess in found) == pytest.approx(most(rate, second, count))
        for place, guess in enumerate(found):  # the guess that it follows comes before it
            assert guess.depth == 1 or (guess.depth - 1, False) in [(g.depth, g.second) for g in found[:place]]


def test_chains_where_first_choices_are_right_and_trees_where_second_ones_often_are() -> None:
    def shape(rate: float, second: float) -> list[tuple[int, bool]]:
        return [(guess.depth, guess.second) for guess in best_guesses(rate, second, 4)]

    assert shape(0.9, 0.5) == shape(0.3, 0.0) == [(depth, False) for depth in (1, 2, 3, 4)]
    assert shape(0.4, 0.7) == [(1, True), (1, False), (2, True), (2, False)]


def test_a_proposal_has_what_the_layer_said() -> None:
    guesses = [
        PlannedGuess(1, False, 0.6),
        PlannedGuess(1, True, 0.3),
        PlannedGuess(2, False, 0.2),
        PlannedGuess(3, True, 0.1),
        PlannedGuess(2, True, 0.1),
    ]
    found = proposal(guesses, [(5, 6), (7, 8)])
    assert found.draft == Draft((5, 6, 7, 8), (-1, -1, 0, 0)) and found.chances == (0.6, 0.3, 0.2, 0.1)
    assert proposal(guesses, [(5,), (7,)]).draft == Draft.chain([5, 7])


def test_shares_are_of_misses() -> None:
    seconds = SecondChoices()
    seconds.learn([(1, 2), (3, 4)], [1, 4])
    assert seconds.share == MEMORY
    for said in ([1, 3], [1], [], [1, 3, 9]):
        seconds.learn([(1, 2), (3, 4)], said)
    seconds.learn([(1,)], [2])
    assert seconds.share == MEMORY, "no miss whose second choice is known"
    seconds.learn([(1, 2)], [7])
    assert seconds.share == pytest.approx(MEMORY * (1 - MEMORY))


def test_rows_of_accepted_guesses_follow_the_text() -> None:
    tree = Draft((5, 6, 7, 8), (-1, -1, 1, 0))
    sequence = ScheduledSequence(1, (9, *tree.token_ids), 3, ((0,),), 5, tree)

    def rows(one: ScheduledSequence, *said: int) -> list[int]:
        return _rows_of(one, cast(Any, SimpleNamespace(prompt=(0, 1), token_ids=[2, 9, *said])))

    assert rows(sequence, 6, 7, 30) == [0, 2, 3]
    assert rows(sequence, 5, 30) == [0, 1]
    assert rows(sequence, 30) == [0] and rows(sequence) == []
    assert rows(sequence._replace(draft=None, token_ids=(9, 4)), 4, 4) == [0, 1]

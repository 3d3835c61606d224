"""Bytes are spent where they help most, and never more than the budget."""

from __future__ import annotations

import itertools
import random

import pytest
from icc.compiler.errors import UsageError
from icc.compiler.weights.formats.mixed import mixed
from icc.passes.allocation import Allocation, Curve, Option, allocate

FORMS = [mixed("n", bits, 32, 96) for bits in (2, 3, 4)]


def curves(count: int, seed: int) -> list[Curve]:
    """Weights of several sizes and sensitivities, whose damage falls with bytes, not always convexly."""
    source = random.Random(seed)
    found = []
    for number in range(count):
        size, worst = source.randint(50, 400), source.random() ** 3
        options = [
            Option.of(form, size * (bits + 2), worst * 4.0**-bits * source.uniform(0.7, 1.4))
            for bits, form in enumerate(FORMS)
        ]
        found.append(Curve(f"w{number}", (Option.of(None, size * 16, 0.0), *options)))
    return found


def best(found: list[Curve], budget: int) -> float:
    every = itertools.product(*(curve.options for curve in found))
    return min(sum(o.damage for o in some) for some in every if sum(o.nbytes for o in some) <= budget)


@pytest.mark.parametrize("seed", range(6))
def test_near_the_best_of_all_choices(seed: int) -> None:
    found = curves(6, seed)
    least = sum(min(o.nbytes for o in curve.options) for curve in found)
    for budget in (least, int(least * 1.3), least * 2, least * 4):
        got = allocate(found, budget + 100, fixed=100)
        assert got.nbytes <= budget + 100
        assert got.damage <= best(found, budget) * 1.3 + 1e-9
        for option in range(4):  # no uniform choice within the budget is better
            uniform = [curve.options[option] for curve in found]
            if sum(o.nbytes for o in uniform) <= budget:
                assert got.damage <= sum(o.damage for o in uniform) + 1e-12


def test_a_budget_for_all_keeps_everything_as_it_is_and_one_for_nothing_is_refused() -> None:
    found = curves(5, 9)
    assert {o.name for o in allocate(found, 1 << 40).options} == {"as stored"}
    with pytest.raises(UsageError, match=r"in the smallest formats, more than 100$"):
        allocate(found, 100)


def test_more_bytes_never_hurt_and_the_report_says_what_was_chosen() -> None:
    found = curves(8, 3)
    ladder: list[Allocation] = [allocate(found, budget) for budget in range(5_000, 41_000, 3_000)]
    assert all(a.damage >= b.damage for a, b in itertools.pairwise(ladder))
    shown = ladder[2].as_json()
    assert shown["bytes"] <= shown["budget"] == 11_000
    assert sum(choice["bytes"] for choice in shown["choices"]) == shown["bytes"]
    assert all(len(choice["others"]) == 3 for choice in shown["choices"])
    assert [step[0] for step in shown["curve"]] == sorted(step[0] for step in shown["curve"])

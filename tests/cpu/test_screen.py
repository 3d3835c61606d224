"""Screened heads: a greedy batch gets the largest logit of the whole product, bit-equal, and reads less."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from cpu_harness import Builder, Runner, flat_batch
from cpu_program import feeds_of
from cpu_screen_case import FIRST, NAMES, SECOND, N, add_screened, head
from icc.compiler.backends.cpu.isa import host_isas
from icc.compiler.backends.cpu.kernels.linear import SCREENED_ROWS

ISAS = [isa.name for isa in host_isas()]


def logits(runner: Runner, program: Builder, tokens: int, greedy: bool, **changes: np.ndarray) -> dict[str, np.ndarray]:
    batch = flat_batch(tokens)
    batch.greedy = greedy
    arrays = runner.step(batch, feeds_of(program, batch, seed=tokens) | changes)
    return {name: arrays[f"{name}.y"] for name in NAMES}


@pytest.mark.parametrize("isa", ISAS)
def test_the_largest_logit_is_that_of_the_whole_product(
    ops_program: Builder, ops_libraries: dict[str, Path], isa: str
) -> None:
    for tokens in range(1, SCREENED_ROWS + 1):
        for threads in (1, 2, 5):
            runner = Runner(ops_libraries[isa], ops_program, threads)
            whole, screened = (logits(runner, ops_program, tokens, greedy) for greedy in (False, True))
            for name in NAMES:
                assert np.array_equal(screened[name].argmax(1), whole[name].argmax(1))  # the first of twins
                known = np.isfinite(screened[name])
                assert np.array_equal(screened[name][known], whole[name][known])
                assert np.isneginf(screened[name][~known]).all()
            if threads == 1:  # one thread compares all rows with the largest
                assert np.isneginf(screened["screened"]).mean() > 0.9
            runner.close()


def test_without_what_it_knows_of_low_nibbles_it_would_be_misled(
    ops_program: Builder, ops_libraries: dict[str, Path]
) -> None:
    """The bound for random low nibbles would discard the planted row: the test above would fail."""
    misled = Builder()
    add_screened(misled, np.random.default_rng(7), "screened_leaning", leans=False)
    for leans, expected in ((True, FIRST), (False, SECOND)):
        runner = Runner(ops_libraries[ISAS[0]], ops_program, 1)
        if not leans:
            runner.weights[list(ops_program.weights).index("screened_leaning.w")][:] = misled.packed[0]
        assert logits(runner, ops_program, 1, True)["screened_leaning"].argmax() == expected
        runner.close()


def test_errors_that_are_not_random_are_noticed_and_it_rests(
    ops_program: Builder, ops_libraries: dict[str, Path]
) -> None:
    """Activations in line with the low nibbles of a sampled row: all logits are computed, also in the next eight
    steps."""
    low = (head("screened")[0][3] & 15) - np.float32(7.5)
    runner = Runner(ops_libraries[ISAS[0]], ops_program, 1)
    assert np.isfinite(logits(runner, ops_program, 1, True, **{"screened.x": low[None]})["screened"]).all()
    whole = [np.isfinite(logits(runner, ops_program, 1, True)["screened"]).all() for _ in range(10)]
    assert whole == [True] * 8 + [False] * 2
    runner.close()


def test_more_rows_than_are_screened_are_whole(ops_program: Builder, ops_libraries: dict[str, Path]) -> None:
    runner = Runner(ops_libraries[ISAS[0]], ops_program, 2)
    whole = logits(runner, ops_program, SCREENED_ROWS + 1, True)["screened"]
    assert np.isfinite(whole).all() and whole.shape == (SCREENED_ROWS + 1, N)
    runner.close()


def test_a_value_that_is_not_a_number_is_seen(ops_program: Builder, ops_libraries: dict[str, Path]) -> None:
    runner = Runner(ops_libraries[ISAS[0]], ops_program, 2)
    for bad in (np.nan, np.inf):
        x = np.ones((2, 128), np.float32)
        x[1, 5] = bad
        y = logits(runner, ops_program, 2, True, **{"screened.x": x})["screened"]
        assert np.isnan(y[1]).all() and np.isfinite(y[0]).any()
    runner.close()

"""Every lowered op on every ISA level of this machine against float64 numpy, at odd shapes and token counts."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
from cpu_harness import Batch, Builder, Runner, flat_batch
from cpu_program import all_ops, feeds_of
from icc.compiler.backends.cpu.isa import host_isas

CASES = [case.name for case in all_ops().cases]
ISAS = [isa.name for isa in host_isas()]


@pytest.fixture(scope="session")
def run(ops_program: Builder, ops_libraries: dict[str, Path]):
    """run(isa, tokens, threads) -> arrays of all buffers after one step, plus the batch's."""

    @cache
    def go(isa: str, tokens: int, threads: int) -> dict[str, np.ndarray]:
        runner = Runner(ops_libraries[isa], ops_program, threads)
        batch = flat_batch(tokens)
        feeds = feeds_of(ops_program, batch)
        arrays = runner.step(batch, feeds)
        runner.close()
        return {**batch.arrays(), **arrays}

    return go


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("isa", ISAS)
def test_op(run, ops_program: Builder, isa: str, name: str) -> None:
    case = next(c for c in ops_program.cases if c.name == name)
    for tokens, threads in ((1, 1), (3, 3), (17, 2)):
        arrays = run(isa, tokens, threads)
        for output, expected in case.expect(arrays).items():
            got = arrays[output].astype(np.float64)
            finite = np.isfinite(expected)
            assert np.array_equal(got[~finite], expected[~finite])
            limit = case.tolerance * max(1.0, np.abs(expected[finite]).max(initial=0))
            error = np.abs(got[finite] - expected[finite]).max(initial=0)
            assert error <= limit, (output, tokens)


@pytest.mark.parametrize("isa", ISAS)
def test_rows_do_not_depend_on_their_batch(ops_program: Builder, ops_libraries: dict[str, Path], isa: str) -> None:
    """R7: each row alone on one thread is bit-equal to the same row among 17 rows on three threads."""
    batch = flat_batch(17)
    batch.logit_rows = np.arange(17)
    feeds = feeds_of(ops_program, batch)
    many, alone = Runner(ops_libraries[isa], ops_program, 3), Runner(ops_libraries[isa], ops_program, 1)
    together = many.step(batch, feeds)
    outputs = {o.name for step in ops_program.steps for o in step.outputs.values() if o}
    assert batch.token_ids is not None
    for t in range(17):
        one = Batch([(t, 1, [0, 1])], 16, batch.token_ids[t : t + 1], np.zeros(1, np.int32))
        single = alone.step(one, {name: value[t : t + 1] for name, value in feeds.items()})
        for name in outputs:
            assert np.array_equal(single[name][0].view(np.uint8), together[name][t].view(np.uint8)), (name, t)
    many.close()
    alone.close()


@pytest.mark.parametrize("isa", ISAS)
def test_threads_with_many_rows_make_rows_of_their_own(
    ops_program: Builder, ops_libraries: dict[str, Path], isa: str
) -> None:
    """With an odd number of rows, enough that threads divide products by rows (`part_of` in gemm.h): bit-equal to one
    thread."""
    batch = flat_batch(135)
    batch.logit_rows = np.arange(135)
    feeds = feeds_of(ops_program, batch)
    runs = []
    for threads in (1, 2):
        runner = Runner(ops_libraries[isa], ops_program, threads, max_tokens=135)
        runs.append(runner.step(batch, feeds))
        runner.close()
    for step in ops_program.steps:
        for output in filter(None, step.outputs.values()):
            assert np.array_equal(*(arrays[output.name].view(np.uint8) for arrays in runs)), output.name


def test_a_step_without_logit_rows_runs(ops_program: Builder, ops_libraries: dict[str, Path]) -> None:
    runner = Runner(ops_libraries[ISAS[0]], ops_program, 2)
    batch = flat_batch(3)
    batch.logit_rows = np.zeros(0, np.int32)
    runner.step(batch, feeds_of(ops_program, batch))
    runner.close()


def test_a_value_that_is_not_a_number_reaches_the_quantized_product(
    ops_program: Builder, ops_libraries: dict[str, Path]
) -> None:
    """Int8 has no NaN: the scale is NaN instead, so that the executor sees a broken row; other rows are unchanged."""
    runner = Runner(ops_libraries[ISAS[0]], ops_program, 2)
    batch = flat_batch(3)
    name = next(c.name for c in ops_program.cases if c.name.startswith("linear_q4"))
    for bad in (np.nan, np.inf):
        feeds = feeds_of(ops_program, batch)
        feeds[f"{name}.x"][1, 5] = bad
        y = runner.step(batch, feeds)[f"{name}.y"]
        assert np.isnan(y[1]).all() and np.isfinite(y[[0, 2]]).all()
    runner.close()


def test_quantized_products_have_the_same_bits_on_every_level(run, ops_program: Builder) -> None:
    names = [f"{c.name}.y" for c in ops_program.cases if c.name.startswith(("linear", "experts"))]
    for name in names:
        results = [run(isa, 17, 2)[name] for isa in ISAS]
        for other in results[1:]:
            assert np.array_equal(results[0], other), name

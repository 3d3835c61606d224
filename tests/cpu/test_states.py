"""Kernels of recurrent layers: against a float64 recurrence, and bit-equal in steps of any lengths."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from cpu_harness import Batch, Builder, Runner
from cpu_program import feeds_of
from cpu_states import BLOCK, all_states, split
from icc.compiler.backends.cpu.build import build_libraries
from icc.compiler.backends.cpu.isa import host_isas

TOKENS = 45
TABLE = [3, 0, 5, 1]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Builder, dict[str, Path]]:
    folder, b = tmp_path_factory.mktemp("states") / "kernels", all_states()
    libraries = build_libraries(b.program(), folder, host_isas(), optimize="-O1")
    return b, {library.isa: folder.parent / library.path for library in libraries}


def test_any_split_gives_the_bits_of_the_recurrence(built: tuple[Builder, dict[str, Path]]) -> None:
    b, libraries = built
    feeds = feeds_of(b, Batch([(0, TOKENS, TABLE)], BLOCK))
    bits = []
    for path in libraries.values():
        runner = Runner(path, b, threads=3, max_tokens=2 * TOKENS, num_blocks=12)
        whole = split(runner, feeds, [TOKENS], TABLE)
        for case in b.cases:
            for name, expected in case.expect(whole).items():
                # a sum that is a tie in only one order of additions may be rounded to bf16 the other way
                near = 2e-3 if name.startswith("rounded") else 3e-6
                assert np.abs(whole[name] - expected).max() < near * np.abs(expected).max(), name
        for ends in ([*range(1, TOKENS + 1)], [7, 8, 9, 21, 24, 36, 45], [1, 30, 45], [16, 40, 45]):
            again = split(runner, feeds, ends, TABLE)
            for name, found in again.items():
                assert np.array_equal(found.view(np.int32), whole[name].view(np.int32)), (name, ends)
        bits.append(whole)
        # a second sequence, and a step whose block has the previous state: another block gets a copy
        first = Batch([(0, 20, TABLE), (0, 25, [7, 8, 9])], BLOCK)
        runner.step(first, {name: np.concatenate([value[:20], value[:25]]) for name, value in feeds.items()})
        second = Batch([(25, 20, [7, 8, 9, 10]), (20, 5, [3, 0, 5])], BLOCK)
        found = runner.step(second, {name: np.concatenate([value[25:], value[20:25]]) for name, value in feeds.items()})
        for name, value in whole.items():
            assert np.array_equal(found[name].view(np.int32), np.concatenate([value[25:], value[20:25]]).view(np.int32))
        runner.close()
    for other in bits[1:]:
        assert all(np.array_equal(other[name], bits[0][name]) for name in other)

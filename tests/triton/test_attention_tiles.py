"""The choice of attention tilings: every target has one that fits for every head size, and small batches are split."""

from __future__ import annotations

import pytest
from icc.compiler.backends.triton.tiling.attention import Workload, decode_tiling, mixed_tiling, split_count
from icc.compiler.backends.triton.tiling.choice import Tuner
from icc.compiler.targets import TARGETS

GPUS = [name for name, target in TARGETS.items() if target.backend != "cpu"]
DIMS = [(16, 16), (64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256)]


@pytest.mark.parametrize("target", GPUS)
@pytest.mark.parametrize(("cached", "multiplied"), [(2, 2), (1, 2), (0.25, 2), (4, 4)])
def test_every_target_has_tilings(target: str, cached: float, multiplied: int) -> None:
    tuner = Tuner(TARGETS[target])
    for key, value in DIMS:
        for kv_heads, group in ((8, 4), (32, 1), (1, 71), (2, 5)):
            work = Workload(kv_heads, group, key, value, cached, multiplied, 32)
            for tiling in (decode_tiling(work, tuner), *(mixed_tiling(work, n, tuner) for n in (16, 8192))):
                assert tiling.heads <= tiling.rows and tiling.heads * tiling.rows >= 16
                assert -(-group // tiling.heads) <= 2 * -(-group // (16 if multiplied == 4 else 64))
                buffered = tiling.tile * (key + value) * cached * max(1, tiling.stages - 1)
                assert buffered <= TARGETS[target].shared_memory_kib * 1024


def test_small_batches_are_split_and_large_ones_are_not() -> None:
    tuner = Tuner(TARGETS["h100"])
    work = Workload(8, 4, 128, 128, 2, 2, 32)
    tiling = decode_tiling(work, tuner)
    counts = [split_count(work, tiling, n, 8192, tuner) for n in (1, 2, 4, 8, 16, 32, 64, 128, 256)]
    assert counts == sorted(counts, reverse=True) and counts[0] >= 32 and counts[-1] == 1
    assert split_count(work, tiling, 1, 64, tuner) <= 2  # no more splits than tiles

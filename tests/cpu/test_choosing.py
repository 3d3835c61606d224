"""The keys that an index chooses, against float64: shuffled blocks, prefill mixed with decodes, every type of cache."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from cpu_attention import LENGTHS, MIXED, play
from cpu_choosing import SHAPES, choosing
from cpu_harness import Runner
from icc.compiler.backends.cpu.build import build_libraries
from icc.compiler.backends.cpu.isa import host_isas
from icc.compiler.ops.selecting import LEFT_OUT
from kv_codes import stored
from sizes import SOAK

LONG = 1100  # more than two segments


def scores_of(data: np.ndarray, layer: int, dtype: str) -> np.ndarray:
    """The scores [T, T] of queries and keys, float64."""
    heads, dim, _ = SHAPES[layer]
    q, k, w = np.split(data.astype(np.float64), [heads * dim, (heads + 1) * dim], axis=1)
    k = stored(k[:, None], dtype)[:, 0] if dtype != "f32" else k
    products = np.maximum(np.einsum("thd,jd->thj", q.reshape(len(q), heads, dim), k), 0)
    return np.einsum("th,thj->tj", w, products)


@pytest.mark.parametrize("dtype", ["f32", "f8", "i8", "i4"])
def test_the_best_keys_are_chosen(dtype: str, tmp_path: Path) -> None:
    b = choosing(dtype)
    isas = host_isas() if SOAK else host_isas()[::2] if dtype == "f32" else host_isas()[-1:]
    for library in build_libraries(b.program(), tmp_path / "kernels", isas, optimize="-O1"):
        runner = Runner(tmp_path / library.path, b, threads=3, max_tokens=LONG, num_blocks=90)
        for lengths, schedule in ((LENGTHS, MIXED), ([LONG], [[(0, LONG - 1)], [(0, 1)]])):
            data, outputs = play(runner, lengths, schedule)
            for inputs, found in zip(data, outputs, strict=True):
                for i, (_, _, count) in enumerate(SHAPES):
                    check(scores_of(inputs[f"qkv{i}"], i, dtype), found[f"o{i}"], count)


def check(scores: np.ndarray, rows: np.ndarray, count: int) -> None:
    for t, (score, row) in enumerate(zip(scores, rows, strict=True)):
        seen, added = score[: t + 1], row[t::-1] if t + 1 < len(row) else row[::-1]
        assert set(np.unique(row)) <= {0.0, LEFT_OUT} and not row[t + 1 :].any()
        chosen = added == 0.0
        assert chosen.sum() == min(count, t + 1)
        if not chosen.all():  # except for nearly equal scores
            assert seen[chosen].min() >= seen[~chosen].max() - 1e-5 * np.abs(seen).max()

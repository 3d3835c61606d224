"""The keys that an index chooses, against float64: shuffled blocks, prefill mixed with decodes, every type of cache."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from cpu_attention import LENGTHS, MIXED, play
from cpu_harness import Builder, Runner
from icc.compiler.backends.cpu.build import build_libraries
from icc.compiler.backends.cpu.isa import host_isas
from icc.compiler.ops.selecting import LEFT_OUT
from icc.compiler.program.steps.attention import ChooseKeys, KVSpec, KvWrite
from icc.runtime.format.kv import KVLayer
from icc.runtime.format.operands import BufferOperand
from kv_codes import stored
from sizes import SOAK

WIDTH, LONG = 1300, 1100  # more than two segments
SHAPES = ((3, 40, 7), (8, 16, 64), (5, 24, 1))  # heads, dims, how many are chosen


def program_of(dtype: str) -> Builder:
    b = Builder(16, dtype)
    for i, (heads, dim, count) in enumerate(SHAPES):
        b.layers.append(KVLayer(1, dim, dim, shared=True))
        stride = (heads + 1) * dim + heads
        q = b.buffer(f"qkv{i}", [stride])
        k, w = (BufferOperand(q.name, "f32", stride, offset) for offset in (heads * dim, (heads + 1) * dim))
        kv = KVSpec(1, dim, dim, dtype, 16, shared=True)
        b.step(KvWrite(layer=i, k=k, kv=kv))
        o = b.buffer(f"o{i}", [WIDTH])
        b.step(ChooseKeys(layer=i, q=q, w=w, o=o, kv=kv, heads=heads, count=count, width=WIDTH))
    return b


def scores_of(data: np.ndarray, layer: int, dtype: str) -> np.ndarray:
    """[T, T] of queries and keys, float64."""
    heads, dim, _ = SHAPES[layer]
    q, k, w = np.split(data.astype(np.float64), [heads * dim, (heads + 1) * dim], axis=1)
    k = stored(k[:, None], dtype)[:, 0] if dtype != "f32" else k
    products = np.maximum(np.einsum("thd,jd->thj", q.reshape(len(q), heads, dim), k), 0)
    return np.einsum("th,thj->tj", w, products)


@pytest.mark.parametrize("dtype", ["f32", "f8", "i8", "i4"])
def test_the_best_keys_are_chosen(dtype: str, tmp_path: Path) -> None:
    b = program_of(dtype)
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
        if not chosen.all():  # but for what is nearly equal
            assert seen[chosen].min() >= seen[~chosen].max() - 1e-5 * np.abs(seen).max()

"""The program of the tests of an index: its keys are written, then some are chosen."""

from __future__ import annotations

from cpu_harness import Builder
from icc.compiler.program.steps.attention import ChooseKeys, KvWrite
from icc.runtime.format.kv import KVLayer
from icc.runtime.format.operands import BufferOperand
from step_making import cache

WIDTH = 1300  # positions
SHAPES = ((3, 40, 7), (8, 16, 64), (5, 24, 1))  # heads, dims, how many are chosen


def choosing(dtype: str) -> Builder:
    """A layer per shape: `qkv` holds queries, the key and the weights of heads; `o` the chosen keys."""
    b = Builder(16, dtype)
    for i, (heads, dim, count) in enumerate(SHAPES):
        b.layers.append(KVLayer(1, dim, dim, shared=True))
        stride = (heads + 1) * dim + heads
        q = b.buffer(f"qkv{i}", [stride])
        k, w = (BufferOperand(q.name, "f32", stride, offset) for offset in (heads * dim, (heads + 1) * dim))
        kept = cache(1, dim, dim, dtype, 16, shared=True)
        b.step(KvWrite(layer=i, k=k, **kept))
        o = b.buffer(f"o{i}", [WIDTH])
        b.step(ChooseKeys(layer=i, q=q, w=w, o=o, heads=heads, count=count, width=WIDTH, **kept))
    return b

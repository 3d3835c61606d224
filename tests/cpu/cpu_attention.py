"""The programs of the attention tests, and how they are fed: shuffled blocks, prefill mixed with decodes."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
from cpu_harness import Batch, Builder, Runner
from icc.compiler.program.program import Program
from icc.compiler.program.steps.attention import Attention, KvWrite, Rotary
from icc.runtime.format.kv import KVLayer
from icc.runtime.format.operands import BufferOperand
from step_making import cache

POSITIONS = 1300  # long enough for more than one segment of 1024 keys
LENGTHS = [45, 26, 131]
MIXED = [[(0, 37)], [(0, 1), (1, 23)], [(1, 1), (0, 1), (2, 90)], [(2, 1), (1, 1), (0, 1)], [(2, 40), (0, 5), (1, 1)]]


@dataclass(frozen=True)
class Shape:
    """One attention layer of the test program."""

    q_heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    rotary_dim: int = 0
    rope_style: str = "half"
    window: int = 0
    front: int = 0
    chunk: int = 0
    softcap: float = 0.0
    sinks: bool = False
    alibi: bool = False
    shared: bool = False  # values are the beginning of keys
    row_bias: int = 0  # columns of the terms that a query adds to its scores by distance


SHAPES = (
    Shape(4, 2, 64, 64, 64),
    Shape(3, 3, 16, 16),
    Shape(6, 1, 40, 24, 16, "interleaved", window=20),
    Shape(5, 5, 80, 80, 40, softcap=5.0),
    Shape(8, 2, 128, 128, 128, sinks=True, window=100),
    Shape(2, 1, 256, 256, chunk=32),
    Shape(4, 4, 8, 8, alibi=True),
    Shape(4, 2, 9, 11, row_bias=50),
    Shape(6, 1, 88, 64, window=100, shared=True),
    Shape(6, 2, 24, 16, 8, "interleaved", window=37, front=19, sinks=True),
    Shape(4, 4, 8, 8, window=20, front=70, alibi=True),
)


@dataclass
class Model:
    """The test program for one cache type and block size, with the shapes for the reference."""

    builder: Builder
    shapes: tuple[Shape, ...]
    cos: dict[int, np.ndarray] = field(default_factory=dict)
    sin: dict[int, np.ndarray] = field(default_factory=dict)
    extra: dict[int, np.ndarray] = field(default_factory=dict)


def build_model(dtype: str, block_size: int, shapes: tuple[Shape, ...] = SHAPES) -> Model:
    b = Builder(block_size, dtype)
    model, rng = Model(b, shapes), np.random.default_rng(3)
    for i, s in enumerate(shapes):
        b.layers.append(KVLayer(s.kv_heads, s.key_dim, s.value_dim, shared=s.shared))
        q_size, k_size, v_size = s.q_heads * s.key_dim, s.kv_heads * s.key_dim, s.kv_heads * s.value_dim
        v_size = 0 if s.shared else v_size
        stride = q_size + k_size + v_size + s.q_heads * s.row_bias
        qkv = b.buffer(f"qkv{i}", [stride])
        out = b.buffer(f"o{i}", [s.q_heads * s.value_dim])
        tables = {}
        if s.rotary_dim:
            angle = np.arange(POSITIONS)[:, None] * 0.3 ** np.arange(s.rotary_dim // 2)
            angle = np.repeat(angle, 2, 1) if s.rope_style == "interleaved" else np.tile(angle, 2)
            model.cos[i], model.sin[i] = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
            tables = {"cos": b.plain(f"cos{i}", model.cos[i]), "sin": b.plain(f"sin{i}", model.sin[i])}
        model.extra[i] = rng.uniform(0.1, 1.0, s.q_heads).astype(np.float32)
        extra = b.plain(f"extra{i}", model.extra[i])
        kept = cache(s.kv_heads, s.key_dim, s.value_dim, dtype, block_size, s.shared)
        turn = Rotary(s.rotary_dim, POSITIONS, s.rope_style)  # type: ignore[arg-type]
        k, v = (BufferOperand(qkv.name, "f32", stride, offset) for offset in (q_size, q_size + k_size))
        b.step(KvWrite(layer=i, k=k, v=None if s.shared else v, rotary=turn, **kept, **tables))
        by_row = BufferOperand(qkv.name, "f32", stride, q_size + k_size + v_size) if s.row_bias else None
        attend = Attention(
            layer=i, q=qkv, o=out, rotary=turn, **kept, q_heads=s.q_heads, scale=s.key_dim**-0.5, window=s.window,
            front=s.front, chunk=s.chunk, softcap=s.softcap, sinks=extra if s.sinks else None,
            alibi=extra if s.alibi else None, row_bias=by_row, row_bias_width=s.row_bias, **tables,
        )  # fmt: skip
        b.step(attend)
    return model


def sequence(program: Program, length: int, seed: int) -> dict[str, np.ndarray]:
    """Queries, keys and values of every layer for one sequence."""
    rng = np.random.default_rng(seed)
    inputs = [b for b in program.buffers if b.name.startswith("qkv")]
    return {b.name: rng.standard_normal((length, *b.shape)).astype(np.float32) for b in inputs}


def play(runner: Runner, lengths: list[int], schedule: list[list[tuple[int, int]]], seed: int = 0):
    """Run the schedule (per step: (sequence, tokens)...) with shuffled blocks; inputs and outputs per sequence."""
    size = runner.program.kv.groups[0].block_size
    data = [sequence(runner.program, n, seed + i) for i, n in enumerate(lengths)]
    free = list(np.random.default_rng(seed).permutation(runner.num_blocks))
    tables = [[int(free.pop()) for _ in range((n + size - 1) // size)] for n in lengths]
    done = [0] * len(lengths)
    outputs: list[dict[str, list[np.ndarray]]] = [defaultdict(list) for _ in lengths]
    for step in schedule:
        batch = Batch([(done[s], n, tables[s]) for s, n in step], size)
        feeds = {k: np.concatenate([data[s][k][done[s] : done[s] + n] for s, n in step]) for k in data[0]}
        arrays, at = runner.step(batch, feeds), 0
        for s, n in step:
            for layer in runner.program.kv.groups[0].layers:
                outputs[s][f"o{layer}"].append(arrays[f"o{layer}"][at : at + n])
            at, done[s] = at + n, done[s] + n
    assert done == lengths
    return data, [{k: np.concatenate(v) for k, v in o.items()} for o in outputs]

"""Paged attention against numpy: shuffled blocks, prefill mixed with decodes, every option, poisoned free blocks."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from cpu_harness import NONE, Batch, Builder, Runner
from icc.compiler.codegen.cpu.build import build_libraries
from icc.compiler.codegen.cpu.isa import host_isas
from icc.runtime.engine.program import KVLayer, Operand

POSITIONS = 1300  # long enough for more than one segment of 1024 keys
ISAS = [isa.name for isa in host_isas()]


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
    chunk: int = 0
    softcap: float = 0.0
    sinks: bool = False
    alibi: bool = False


SHAPES = (
    Shape(4, 2, 64, 64, 64),
    Shape(3, 3, 16, 16),
    Shape(6, 1, 40, 24, 16, "interleaved", window=20),
    Shape(5, 5, 80, 80, 40, softcap=5.0),
    Shape(8, 2, 128, 128, 128, sinks=True, window=100),
    Shape(2, 1, 256, 256, chunk=32),
    Shape(4, 4, 8, 8, alibi=True),
)


@dataclass
class Model:
    """The test program for one cache type and block size, with what the reference needs to know."""

    builder: Builder
    cos: dict[int, np.ndarray] = field(default_factory=dict)
    sin: dict[int, np.ndarray] = field(default_factory=dict)
    extra: dict[int, np.ndarray] = field(default_factory=dict)


def build_model(dtype: str, block_size: int) -> Model:
    b = Builder(block_size, dtype)
    model, rng = Model(b), np.random.default_rng(3)
    for i, s in enumerate(SHAPES):
        b.layers.append(KVLayer(s.kv_heads, s.key_dim, s.value_dim, s.window))
        q_size, k_size, v_size = s.q_heads * s.key_dim, s.kv_heads * s.key_dim, s.kv_heads * s.value_dim
        stride = q_size + k_size + v_size
        qkv = b.buffer(f"qkv{i}", [stride])
        out = b.buffer(f"o{i}", [s.q_heads * s.value_dim])
        tables = [NONE, NONE]
        if s.rotary_dim:
            angle = np.arange(POSITIONS)[:, None] * 0.3 ** np.arange(s.rotary_dim // 2)
            angle = np.repeat(angle, 2, 1) if s.rope_style == "interleaved" else np.tile(angle, 2)
            model.cos[i], model.sin[i] = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
            tables = [b.plain(f"cos{i}", model.cos[i]), b.plain(f"sin{i}", model.sin[i])]
        model.extra[i] = rng.uniform(0.1, 1.0, s.q_heads).astype(np.float32)
        extra = b.plain(f"extra{i}", model.extra[i])
        cache = {
            "kv_heads": s.kv_heads,
            "key_dim": s.key_dim,
            "value_dim": s.value_dim,
            "dtype": dtype,
            "block_size": block_size,
            "rotary_dim": s.rotary_dim,
            "rope_style": s.rope_style,
            "table_rows": POSITIONS,
        }

        def part(offset: int, name: str = qkv.name) -> Operand:
            return Operand("buffer", name, offset)

        b.step(
            "kv_write",
            cache | {"k_stride": stride, "v_stride": stride},
            [part(q_size), part(q_size + k_size), *tables],
            [],
            i,
        )
        params = cache | {
            "q_heads": s.q_heads,
            "q_stride": stride,
            "o_stride": s.q_heads * s.value_dim,
            "scale": s.key_dim**-0.5,
            "window": s.window,
            "chunk": s.chunk,
            "softcap": s.softcap,
            "has_sinks": s.sinks,
            "has_alibi": s.alibi,
        }
        b.step("attention", params, [qkv, *tables, extra if s.sinks else NONE, extra if s.alibi else NONE], [out], i)
    return model


def rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, style: str) -> np.ndarray:
    r = cos.shape[-1]
    head = x[..., :r]
    if style == "half":
        turned = np.concatenate([-head[..., r // 2 :], head[..., : r // 2]], -1)
    else:
        turned = np.stack([-head[..., 1::2], head[..., ::2]], -1).reshape(head.shape)
    return np.concatenate([head * cos[:, None] + turned * sin[:, None], x[..., r:]], -1)


def reference(model: Model, layer: int, qkv: np.ndarray) -> np.ndarray:
    """All positions of one sequence at once, float64."""
    s, t = SHAPES[layer], len(qkv)
    q, k, v = np.split(qkv.astype(np.float64), [s.q_heads * s.key_dim, (s.q_heads + s.kv_heads) * s.key_dim], axis=1)
    q, k, v = q.reshape(t, s.q_heads, -1), k.reshape(t, s.kv_heads, -1), v.reshape(t, s.kv_heads, -1)
    if s.rotary_dim:
        q, k = (rotate(x, model.cos[layer][:t], model.sin[layer][:t], s.rope_style) for x in (q, k))
    group = s.q_heads // s.kv_heads
    scores = np.einsum("ihd,jhd->hij", q, np.repeat(k, group, 1)) * s.key_dim**-0.5
    i, j = np.arange(t)[:, None], np.arange(t)[None]
    if s.softcap:
        scores = s.softcap * np.tanh(scores / s.softcap)
    if s.alibi:
        scores = scores + model.extra[layer][:, None, None] * (j - i)
    visible = (
        (j <= i) & ((j > i - s.window) if s.window else True) & ((j // s.chunk == i // s.chunk) if s.chunk else True)
    )
    scores = np.where(visible, scores, -np.inf)
    peak = scores.max(-1, keepdims=True)
    e = np.exp(scores - peak)
    total = e.sum(-1, keepdims=True)
    if s.sinks:
        total = total + np.exp(model.extra[layer][:, None, None] - peak)
    return np.einsum("hij,jhd->ihd", e / total, np.repeat(v, group, 1)).reshape(t, -1)


@pytest.fixture(
    scope="session", params=[("f32", 16), ("bf16", 32), ("f16", 8), ("i8", 16)], ids=lambda p: f"{p[0]}_b{p[1]}"
)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, dict[str, Path]]:
    model = build_model(*request.param)
    folder = tmp_path_factory.mktemp("attention") / "kernels"
    isas = host_isas() if request.param[0] == "f32" else host_isas()[::2]
    libraries = build_libraries(model.builder.program(), folder, isas, optimize="-O1")
    return model, {library.isa: folder.parent / library.path for library in libraries}


def sequence(length: int, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    widths = [s.q_heads * s.key_dim + s.kv_heads * (s.key_dim + s.value_dim) for s in SHAPES]
    return {f"qkv{i}": rng.standard_normal((length, w)).astype(np.float32) for i, w in enumerate(widths)}


def play(runner: Runner, block_size: int, lengths: list[int], schedule: list[list[tuple[int, int]]], seed: int = 0):
    """Run the schedule (per step: (sequence, tokens)...) with shuffled blocks; outputs per sequence and layer."""
    data = [sequence(n, seed + i) for i, n in enumerate(lengths)]
    rng = np.random.default_rng(seed)
    free = list(rng.permutation(len(runner.kv) // runner.program.kv.total_block_bytes()))
    tables = [[int(free.pop()) for _ in range((n + block_size - 1) // block_size)] for n in lengths]
    done = [0] * len(lengths)
    outputs: list[dict[str, list[np.ndarray]]] = [{f"o{i}": [] for i in range(len(SHAPES))} for _ in lengths]
    for step in schedule:
        batch = Batch([(done[s], n, tables[s]) for s, n in step], block_size)
        feeds = {k: np.concatenate([data[s][k][done[s] : done[s] + n] for s, n in step]) for k in data[0]}
        arrays, at = runner.step(batch, feeds), 0
        for s, n in step:
            for name in outputs[s]:
                outputs[s][name].append(arrays[name][at : at + n])
            at, done[s] = at + n, done[s] + n
    assert done == lengths
    return data, [{k: np.concatenate(v) for k, v in o.items()} for o in outputs]


TOLERANCE = {"f32": 3e-6, "bf16": 2e-2, "f16": 3e-3, "i8": 3e-2}
MIXED = [[(0, 37)], [(0, 1), (1, 23)], [(1, 1), (0, 1), (2, 90)], [(2, 1), (1, 1), (0, 1)], [(2, 40), (0, 5), (1, 1)]]


@pytest.mark.parametrize("isa", ISAS)
def test_paged_attention(built: tuple[Model, dict[str, Path]], isa: str) -> None:
    model, libraries = built
    if isa not in libraries:
        pytest.skip("built for the best and the most portable level only")
    layout = model.builder.program().kv
    runner = Runner(libraries[isa], model.builder, 2, 160, num_blocks=60)
    data, outputs = play(runner, layout.block_size, [45, 26, 131], MIXED)
    runner.close()
    for qkv, got in zip(data, outputs, strict=True):
        for layer in range(len(SHAPES)):
            expected = reference(model, layer, qkv[f"qkv{layer}"])
            error = np.abs(got[f"o{layer}"] - expected).max() / np.abs(expected).max()
            assert error < TOLERANCE[layout.dtype], (layer, error)


def test_bits_do_not_depend_on_chunking_mates_or_threads(built: tuple[Model, dict[str, Path]]) -> None:
    model, libraries = built
    size = model.builder.block_size
    for isa, path in libraries.items():
        results = []
        for threads, schedule in (
            (2, MIXED),
            (1, [[(0, 45)], [(1, 26)], [(2, 131)]]),
            (3, [[(2, 7), (1, 13)], [(0, 45), (2, 124)], [(1, 13)]]),
        ):
            runner = Runner(path, model.builder, threads, 256, num_blocks=60)
            results.append(play(runner, size, [45, 26, 131], schedule)[1])
            runner.close()
        for other in results[1:]:
            for a, b in zip(results[0], other, strict=True):
                assert all(np.array_equal(a[name], b[name]) for name in a), isa


def test_long_context_split_over_threads(built: tuple[Model, dict[str, Path]]) -> None:
    """1200 keys: four threads split the context of the last token into segments, one thread does not."""
    model, libraries = built
    layout, (isa, path) = model.builder.program().kv, next(iter(libraries.items()))
    if layout.dtype not in ("f32", "i8"):
        pytest.skip("the cache type does not matter here; float and scaled are enough")
    blocks = 1200 // layout.block_size + 2
    results = []
    for threads, schedule in ((4, [[(0, 1190)], *[[(0, 1)]] * 10]), (1, [[(0, 1200)]])):
        runner = Runner(path, model.builder, threads, 1200, num_blocks=blocks)
        data, outputs = play(runner, layout.block_size, [1200], schedule)
        results.append(outputs[0])
        runner.close()
    for layer in range(len(SHAPES)):
        name = f"o{layer}"
        assert np.array_equal(results[0][name], results[1][name]), (isa, layer)
        expected = reference(model, layer, data[0][f"qkv{layer}"])
        assert np.abs(results[0][name] - expected).max() / np.abs(expected).max() < TOLERANCE[layout.dtype]

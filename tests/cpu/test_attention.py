"""Paged attention against numpy: shuffled blocks, prefill mixed with decodes, every option, poisoned free blocks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from cpu_attention import LENGTHS, MIXED, SHAPES, Model, build_model, play, sequence
from cpu_harness import Batch, Runner
from icc.compiler.backends.cpu.build import build_libraries
from icc.compiler.backends.cpu.isa import host_isas
from kv_codes import stored
from sizes import SOAK, soak

pytestmark = pytest.mark.slow

CODED = ("f8", "i4", "i2")
SHARED = SHAPES[8:10]
FEWER = (SHAPES[4], SHAPES[7], *SHARED)  # several mixed blocks (see glossary), and widths that are no whole bytes
ISAS = [isa.name for isa in host_isas()]


def rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, style: str) -> np.ndarray:
    r = cos.shape[-1]
    head = x[..., :r]
    if style == "half":
        turned = np.concatenate([-head[..., r // 2 :], head[..., : r // 2]], -1)
    else:
        turned = np.stack([-head[..., 1::2], head[..., ::2]], -1).reshape(head.shape)
    return np.concatenate([head * cos[:, None] + turned * sin[:, None], x[..., r:]], -1)


def reference(model: Model, layer: int, qkv: np.ndarray) -> np.ndarray:
    """Attention outputs of all positions of one sequence at once, in float64."""
    s, t = model.shapes[layer], len(qkv)
    qkv, by_row = np.split(qkv.astype(np.float64), [qkv.shape[1] - s.q_heads * s.row_bias], axis=1)
    q, k, v = np.split(qkv, [s.q_heads * s.key_dim, (s.q_heads + s.kv_heads) * s.key_dim], axis=1)
    q, k, v = q.reshape(t, s.q_heads, -1), k.reshape(t, s.kv_heads, -1), v.reshape(t, -1 if v.size else 0, s.value_dim)
    i, j = np.arange(t)[:, None], np.arange(t)[None]
    based = np.minimum(i, s.front + s.window - 1) if s.front else i
    far = q
    if s.rotary_dim:
        cos, sin = model.cos[layer], model.sin[layer]
        far = rotate(q, cos[based[:, 0]], sin[based[:, 0]], s.rope_style)
        q, k = (rotate(x, cos[:t], sin[:t], s.rope_style) for x in (q, k))
    dtype = model.builder.kv_dtype
    if dtype in CODED:
        k, v = stored(k, dtype), v if s.shared else stored(v, dtype)
    if s.shared:
        v = k[..., : s.value_dim]
    group = s.q_heads // s.kv_heads
    q, far, k, v = (x.transpose(1, 0, 2) for x in (q, far, np.repeat(k, group, 1), np.repeat(v, group, 1)))
    scores = np.where(j < s.front, far @ k.transpose(0, 2, 1), q @ k.transpose(0, 2, 1)) * s.key_dim**-0.5
    if s.softcap:
        scores = s.softcap * np.tanh(scores / s.softcap)
    if s.alibi:
        scores = scores + model.extra[layer][:, None, None] * (j - np.where(j < s.front, based, i))
    if s.row_bias:
        near = np.broadcast_to(np.clip(i - j, 0, s.row_bias - 1), scores.shape)
        added = np.take_along_axis(by_row.reshape(t, s.q_heads, -1).transpose(1, 0, 2), near, 2)
        scores = scores + np.where(i - j < s.row_bias, added, 0.0)
    visible = (
        (j <= i)
        & ((j > i - s.window) | (j < s.front) if s.window else True)
        & ((j // s.chunk == i // s.chunk) if s.chunk else True)
    )
    scores = np.where(visible, scores, -np.inf)
    peak = scores.max(-1, keepdims=True)
    e = np.exp(scores - peak)
    total = e.sum(-1, keepdims=True)
    if s.sinks:
        total = total + np.exp(model.extra[layer][:, None, None] - peak)
    return (e / total @ v).transpose(1, 0, 2).reshape(t, -1)


@pytest.fixture(
    scope="session",
    params=[("f32", 16), ("bf16", 32), ("i8", 16), ("f8", 48), ("i4", 16), *soak((("f16", 48),), (("i2", 32),))],
    ids=lambda p: f"{p[0]}_b{p[1]}",
)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, dict[str, Path]]:
    dtype, size = request.param
    some = FEWER if dtype in CODED else SHAPES if dtype == "f32" else (*SHAPES[: 4 if dtype == "i8" else 2], *SHARED)
    model = build_model(dtype, size, SHAPES if SOAK else some)
    folder = tmp_path_factory.mktemp("attention") / "kernels"
    isas = host_isas() if request.param[0] == "f32" else host_isas()[::2]
    libraries = build_libraries(model.builder.program(), folder, isas, optimize="-O1")
    return model, {library.isa: folder.parent / library.path for library in libraries}


# f8, i4 and i2 against their decoded values: numbers halfway between two codes may be rounded either way
TOLERANCE = {"f32": 3e-6, "bf16": 2e-2, "f16": 3e-3, "i8": 3e-2, "f8": 1e-3, "i4": 1e-2, "i2": 2e-2}


@pytest.mark.parametrize("isa", ISAS)
def test_paged_attention(built: tuple[Model, dict[str, Path]], isa: str) -> None:
    model, libraries = built
    if isa not in libraries:
        pytest.skip("built for the best and the most portable level only")
    [layout] = model.builder.program().kv.groups
    runner = Runner(libraries[isa], model.builder, 2, 160, num_blocks=60)
    data, outputs = play(runner, LENGTHS, MIXED)
    runner.close()
    for qkv, got in zip(data, outputs, strict=True):
        for layer in range(len(model.shapes)):
            expected = reference(model, layer, qkv[f"qkv{layer}"])
            error = np.abs(got[f"o{layer}"] - expected).max() / np.abs(expected).max()
            assert error < TOLERANCE[layout.dtype], (layer, error)


def test_bits_do_not_depend_on_chunking_mates_or_threads(built: tuple[Model, dict[str, Path]]) -> None:
    model, libraries = built
    for isa, path in libraries.items():
        results = []
        for threads, schedule in (
            (2, MIXED),
            (1, [[(0, 45)], [(1, 26)], [(2, 131)]]),
            (3, [[(2, 7), (1, 13)], [(0, 45), (2, 124)], [(1, 12)], [(1, 1)]]),  # a token alone: its heads are shared
        ):
            runner = Runner(path, model.builder, threads, 256, num_blocks=60)
            results.append(play(runner, LENGTHS, schedule)[1])
            runner.close()
        for other in results[1:]:
            for a, b in zip(results[0], other, strict=True):
                assert all(np.array_equal(a[name], b[name]) for name in a), isa


def test_long_context_split_over_threads(built: tuple[Model, dict[str, Path]]) -> None:
    """1200 keys: several threads split the context of the last token into segments, one thread does not."""
    model, libraries = built
    [layout], (isa, path) = model.builder.program().kv.groups, next(iter(libraries.items()))
    if layout.dtype not in ("f32", "i8"):
        pytest.skip("the cache type does not matter here; float and scaled are enough")
    blocks = 1200 // layout.block_size + 2
    results = []
    steps = [[(0, 1190)], *[[(0, 1)]] * 10]
    for threads, schedule in ((4, steps), (1, [[(0, 1200)]]), (11, steps)):  # 11: barriers of two groups
        runner = Runner(path, model.builder, threads, 1200, num_blocks=blocks)
        data, outputs = play(runner, [1200], schedule)
        results.append(outputs[0])
        runner.close()
    for layer in range(len(model.shapes)):
        name = f"o{layer}"
        assert all(np.array_equal(one[name], results[0][name]) for one in results), (isa, layer)
        expected = reference(model, layer, data[0][f"qkv{layer}"])
        assert np.abs(results[0][name] - expected).max() / np.abs(expected).max() < TOLERANCE[layout.dtype]


# A tree of drafts after a context: parents of its tokens within the sequence; token 0 is the one that was sampled.
TREE = [0, 0, 1, 1, 2, 3, 3, 6]
PATHS = {t: [t] for t in range(len(TREE) + 1)}
for token, parent in enumerate(TREE, start=1):
    PATHS[token] = [*PATHS[parent], token]


@pytest.mark.parametrize("context", [9, 60, 70])  # within a chunk of 64 keys, across its end, after it
def test_a_tree_of_drafts_has_the_bits_of_its_branches(built: tuple[Model, dict[str, Path]], context: int) -> None:
    """Every token of a tree, beside a decode and a prefill, has the output that it has if its branch is decoded
    alone."""
    model, libraries = built
    for isa, path in libraries.items():
        size = model.builder.program().kv.groups[0].block_size
        tree = sequence(model.builder.program(), context + len(TREE) + 1, 1)
        table = [int(b) for b in np.random.default_rng(0).permutation(40)[: context + len(TREE) // size + 1]]
        mate = [b for b in range(40, 46)]
        runner = Runner(path, model.builder, 2, 160, num_blocks=46)
        others = {k: v[:16] for k, v in tree.items()}
        runner.step(
            Batch([(0, context, table), (0, 16, mate)], size),
            {k: np.concatenate([v[:context], others[k]]) for k, v in tree.items()},
        )
        sequences = [(16, 1, mate), (context, len(TREE) + 1, table)]
        feeds = {k: np.concatenate([v[:1], v[context:]]) for k, v in tree.items()}
        verified = runner.step(Batch(sequences, size, trees={1: TREE}), feeds)
        runner.close()
        for token, way in PATHS.items():
            plain = Runner(path, model.builder, 1, 160, num_blocks=46)
            plain.step(Batch([(0, context, table)], size), {k: v[:context] for k, v in tree.items()})
            for depth, t in enumerate(way):
                one = {k: v[context + t : context + t + 1] for k, v in tree.items()}
                got = plain.step(Batch([(context + depth, 1, table)], size), one)
            plain.close()
            for layer in range(len(model.shapes)):
                assert np.array_equal(got[f"o{layer}"][0], verified[f"o{layer}"][1 + token]), (isa, token, layer)


def test_an_accepted_path_is_moved_and_read_as_if_decoded(built: tuple[Model, dict[str, Path]]) -> None:
    """After a tree, the keys and values of one branch are moved to the slots where plain decoding writes them."""
    model, libraries = built
    context, way = 13, PATHS[8]
    for isa, path in libraries.items():
        size = model.builder.program().kv.groups[0].block_size
        data = sequence(model.builder.program(), context + len(TREE) + 2, 2)
        table = [7, 3, 11, 5][: (context + len(TREE) + 1) // size + 1]

        def slot(position: int, table: list[int] = table, size: int = size) -> int:
            return table[position // size] * size + position % size

        last = {k: v[-1:] for k, v in data.items()}
        runner = Runner(path, model.builder, 2, 160, num_blocks=12)
        runner.step(Batch([(0, context, table)], size), {k: v[:context] for k, v in data.items()})
        runner.step(
            Batch([(context, len(TREE) + 1, table)], size, trees={0: TREE}), {k: v[context:-1] for k, v in data.items()}
        )
        moves = [(slot(context + t), slot(context + d)) for d, t in enumerate(way) if t != d]
        got = runner.step(Batch([(context + len(way), 1, table)], size, moves=moves), last)
        runner.close()
        plain = Runner(path, model.builder, 2, 160, num_blocks=12)
        rows = [*range(context), *(context + t for t in way)]
        plain.step(Batch([(0, len(rows), table)], size), {k: v[rows] for k, v in data.items()})
        expected = plain.step(Batch([(len(rows), 1, table)], size), last)
        plain.close()
        for layer in range(len(model.shapes)):
            assert np.array_equal(got[f"o{layer}"], expected[f"o{layer}"]), (isa, layer)

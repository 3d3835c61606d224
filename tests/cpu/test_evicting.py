"""Attention with eviction: outputs and kept keys are those of the definition (compiler/ops/evicting.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cpu_attention import POSITIONS
from cpu_harness import Batch, Builder, Runner
from icc.compiler.backends.cpu.build import build_libraries
from icc.compiler.backends.cpu.isa import host_isas
from icc.compiler.eviction import Eviction
from icc.compiler.ops.attention import rotate
from icc.compiler.ops.evicting import attend_evicting
from icc.compiler.program.steps.attention import Attention, KvWrite, Rotary
from icc.runtime.format.kv import KVLayer
from icc.runtime.kv.places import CompressedPrompt, HeavyHitters, Places
from sizes import SOAK, soak

POLICIES: dict[str, tuple[Eviction, Places]] = {
    "h2o": (Eviction("h2o", 64, 16), HeavyHitters(64, 16)),
    "snapkv": (Eviction("snapkv", 64, 8), CompressedPrompt(64, 8)),
}
HEADS, GROUP, KEY, VALUE = 2, 3, 16, 24
LAYERS = [(HEADS, KEY, VALUE, False), *([(1, 72, 64, True)] if SOAK else [])]  # heads, dims, values are in the keys


def build(kind: str, dtype: str, folder: Path) -> tuple[Builder, Path]:
    """A library: a layer with rotated keys and learned sinks, and one whose values are the first columns of its
    keys."""
    policy, _ = POLICIES[kind]
    b, rng = Builder(16, dtype), np.random.default_rng(3)
    angle = np.tile(np.arange(POSITIONS)[:, None] * 0.3 ** np.arange(KEY // 2), 2)
    tables = {name: b.plain(name, fn(angle).astype(np.float32)) for name, fn in (("cos", np.cos), ("sin", np.sin))}
    sinks = b.plain("sinks", rng.uniform(0.1, 1.0, HEADS * GROUP).astype(np.float32))
    choice = {"evicts": policy.kind, "budget": policy.size, "recent": policy.beside}
    for layer, (heads, key, value, shared) in enumerate(LAYERS):
        b.layers.append(KVLayer(heads, key, value, shared=shared, scored=True))
        kept: Any = {"kv": b.layers[-1], "cache": dtype, "block_size": 16}
        q, k, v = (b.buffer(f"{name}{layer}", [size]) for name, size in (
            ("q", heads * GROUP * key), ("k", heads * key), ("v", heads * value),
        ))  # fmt: skip
        rest = {} if shared else tables
        turn = Rotary() if shared else Rotary(KEY, POSITIONS)
        b.step(KvWrite(layer=layer, k=k, v=None if shared else v, rotary=turn, **kept, **rest))
        out = b.buffer(f"o{layer}", [heads * GROUP * value])
        b.step(Attention(
            layer=layer, q=q, o=out, rotary=turn, q_heads=heads * GROUP, scale=key**-0.5,
            sinks=None if shared else sinks, **kept, **rest, **choice,
        ))  # fmt: skip
    [library] = build_libraries(b.program(), folder / "kernels", host_isas()[:1], optimize="-O1")
    return b, folder / library.path


def expected(kind: str, layer: int, data: dict[str, np.ndarray], prompt: int) -> np.ndarray:
    heads, key, value, shared = LAYERS[layer]
    tokens = len(data[f"q{layer}"])
    q, k = (torch.from_numpy(data[f"{x}{layer}"]).double().view(tokens, -1, key) for x in "qk")
    v = k[..., :value] if shared else torch.from_numpy(data[f"v{layer}"]).double().view(tokens, heads, value)
    sinks = None
    if not shared:
        angle = torch.outer(torch.arange(tokens, dtype=torch.float64), 0.3 ** torch.arange(KEY // 2)).repeat(1, 2)
        q, k = (rotate(x, angle.cos(), angle.sin(), "half") for x in (q, k))
        sinks = torch.from_numpy(np.random.default_rng(3).uniform(0.1, 1.0, HEADS * GROUP).astype(np.float32)).double()
    scores = torch.einsum("ihd,jhd->hij", q, k.repeat_interleave(GROUP, 1)) * key**-0.5
    return attend_evicting(scores, v, sinks, POLICIES[kind][0], prompt).reshape(tokens, -1).numpy()


@pytest.mark.parametrize(("kind", "dtype"), [("h2o", "f32"), *soak(("snapkv", "f32"), ("h2o", "i8"), ("snapkv", "i4"))])
def test_what_is_forgotten(kind: str, dtype: str, tmp_path: Path) -> None:
    """Two sequences, in chunks that end at evictions: bit-equal alone and together, and equal to the definition."""
    builder, path = build(kind, dtype, tmp_path)
    policy, lengths, prompts = POLICIES[kind][1], [190, 130], [150, 40]
    rng = np.random.default_rng(0)
    names = [b.name for b in builder.buffers if b.name[0] in "qkv"]
    shapes = {b.name: b.shape for b in builder.buffers}
    data = [{n: rng.standard_normal((count, *shapes[n])).astype(np.float32) * 2 for n in names} for count in lengths]
    results = []
    for threads, most in ((1, 70), (2, 23)):
        runner = Runner(path, builder, threads, 160, num_blocks=26)
        blocks = rng.permutation(26).tolist()
        tables = [blocks[:13], blocks[13:]]
        done, found = [0, 0], [{f"o{layer}": [] for layer in range(len(LAYERS))} for _ in lengths]
        while done != lengths:
            going = [s for s in (0, 1) if done[s] < lengths[s]]
            counts = [min(most, policy.until(done[s], prompts[s]), lengths[s] - done[s]) for s in going]
            counts = [1 if done[s] >= prompts[s] and most == 23 else n for s, n in zip(going, counts, strict=True)]
            batch = Batch(
                [(done[s], n, tables[s]) for s, n in zip(going, counts, strict=True)], policy=policy,
                prompts=[prompts[s] for s in going],
            )  # fmt: skip
            pieces = [(s, done[s], done[s] + n) for s, n in zip(going, counts, strict=True)]
            arrays = runner.step(batch, {n: np.concatenate([data[s][n][a:e] for s, a, e in pieces]) for n in names})
            at = 0
            for s, begin, end in pieces:
                for name, rows in found[s].items():
                    rows.append(arrays[name][at : at + end - begin])
                at, done[s] = at + end - begin, end
        runner.close()
        results.append([{name: np.concatenate(rows) for name, rows in one.items()} for one in found])
    for s in (0, 1):
        for layer in range(len(LAYERS)):
            name = f"o{layer}"
            assert np.array_equal(results[0][s][name], results[1][s][name]), (s, layer)
            wanted = expected(kind, layer, data[s], prompts[s])
            error = np.abs(results[0][s][name] - wanted).max(axis=1) / np.abs(wanted).max()
            assert dtype != "f32" or error.max() < 1e-5, (s, layer, int(error.argmax()))

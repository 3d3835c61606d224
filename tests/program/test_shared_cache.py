"""Layers that read the same keys and values have one cache, which is written once (Gemma 3n)."""

from __future__ import annotations

from pathlib import Path

import torch
from graph_tracing import IDS, Value, attention, difference, icc, random, trace
from icc.compiler.graph.interpret import interpret
from icc.compiler.ops import AttentionMask, AttentionSpec
from run_lowered import lower_graph, optimize, run_lowered


def attended(q: Value, k: Value, v: Value, layer: int, window: int = 0) -> Value:
    return attention(q, k, v, AttentionSpec(layer, 0.5, AttentionMask(window))).view(-1, 32)


def model(positions: Value, x: Value, y: Value, cos: Value, sin: Value) -> Value:
    """Four layers: the second reads a window of what the first reads; the fourth has the third's values only."""

    def turned(h: Value, heads: int) -> Value:
        rows = [icc.embedding.default(positions, t) for t in (cos, sin)]
        return icc.rope.default(h.view(-1, heads, 8), *rows, "half")

    k, v = turned(x.slice(1, 0, 16), 2), x.slice(1, 16, 32).view(-1, 2, 8)
    first = attended(turned(x, 4), k, v, 0)
    second = attended(turned(first + y, 4), k, v, 1, 5)
    other = turned(second.slice(1, 0, 16), 2)
    third = attended(turned(second, 4), other, v, 2)
    return attended(turned(third, 4), turned(third.slice(1, 0, 16), 2), v, 3) + second


def test_one_cache_is_written_once_and_read_twice(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    angles = torch.outer(torch.arange(64.0), 0.3 ** torch.arange(4)).repeat(1, 2)
    vectors = {name: random(name, (64, 32)) for name in ("x", "y")}
    graph = trace(model, positions="", **dict.fromkeys(vectors, "f32[T, 32]"), cos=angles.cos(), sin=angles.sin())
    before = interpret(graph, IDS)
    lowered = lower_graph(optimize(graph))
    program = lowered.program
    [group] = program.kv.groups
    assert len(group.layers) == 3 and group.keeps == "all"  # the longer of the ranges that two layers read
    steps = [(step.op, step.layer) for step in program.steps if step.op in ("kv_write", "attention")]
    assert [layer for op, layer in steps if op == "kv_write"] == [0, 1, 2]
    assert [layer for op, layer in steps if op == "attention"] == [0, 0, 1, 2]
    assert difference(before, torch.from_numpy(run_lowered(lowered, tmp_path, list(IDS)))) < 1e-5

"""evict: the attention layers that evict tokens, and the models that are refused."""

from __future__ import annotations

import pytest
import torch
from graph_tracing import Value, icc, paged_attention, trace
from icc.compiler.errors import UsageError
from icc.compiler.eviction import Eviction
from icc.compiler.graph.graph import Graph, attention_spec
from icc.compiler.graph.parser import parse_graph
from icc.compiler.graph.printer import print_graph
from icc.compiler.ops import OPS, AttentionMask, AttentionSpec
from icc.passes.attention.evict import Evict
from icc.passes.base import PassContext
from icc.passes.manager import run_passes

POLICY = Eviction("streaming", 32, 2)
TABLES = {"cos": "f32[64, 8]", "sin": "f32[64, 8]"}


def run(fn: object, policy: Eviction | None = POLICY, **inputs: str) -> Graph:
    """The graph after two runs; asserts that the second changes nothing."""
    graph = trace(fn, positions="", q="f32[T, 4, 8]", k="f32[T, 2, 8]", **inputs)  # type: ignore[arg-type]
    first, second = (run_passes(graph, [Evict(policy)], PassContext())[0] for _ in range(2))
    assert first.modified and not second.modified
    return graph


def paged(q: Value, k: Value, positions: Value, cos: Value, sin: Value, layer: int, window: int = 0) -> Value:
    return paged_attention(q, k, k, positions, AttentionSpec(layer, 0.5, AttentionMask(window)), cos, sin, cos, sin)


def test_layers_with_a_window_stay_as_they_are() -> None:
    def fn(positions: Value, q: Value, k: Value, cos: Value, sin: Value) -> Value:
        return paged(paged(q, k, positions, cos, sin, 0, 9), k, positions, cos, sin, 1)

    graph = run(fn, **TABLES)
    assert [attention_spec(node).policy for node in graph.attention_nodes] == [None, POLICY]
    text = print_graph(graph)
    assert print_graph(parse_graph(text)) == text and 'Eviction{kind="streaming", size=32, beside=2}' in text


def test_refuses_what_has_windows_alone() -> None:
    def fn(positions: Value, q: Value, k: Value, cos: Value, sin: Value) -> Value:
        return paged(q, k, positions, cos, sin, 0, 9)

    with pytest.raises(UsageError, match="no layer of the model keeps all tokens"):
        run(fn, **TABLES)


def test_refuses_positions_outside_of_attention() -> None:
    """Learned positions, or rotary embedding of a part of the keys that the kernel does not rotate (latent caches)."""

    def fn(positions: Value, q: Value, k: Value, cos: Value, sin: Value, table: Value) -> Value:
        return paged(q + icc.embedding.default(positions, table).view(-1, 1, 8), k, positions, cos, sin, 0)

    with pytest.raises(UsageError, match="cannot have it"):
        run(fn, table="f32[64, 8]", **TABLES)


def test_refuses_to_choose_where_places_tell_distances_or_layers_share() -> None:
    def sloped(positions: Value, q: Value, k: Value, slopes: Value) -> Value:
        return paged_attention(q, k, k, positions, AttentionSpec(0, 0.5), None, None, None, None, None, slopes)

    def shared(positions: Value, q: Value, k: Value, cos: Value, sin: Value) -> Value:
        return paged(paged(q, k, positions, cos, sin, 0), k, positions, cos, sin, 0)

    with pytest.raises(UsageError, match="adds something by distance"):
        run(sloped, Eviction("h2o", 1024, 256), slopes="f32[4]")
    with pytest.raises(UsageError, match="read the same cache"):
        run(shared, Eviction("snapkv", 1024, 32), **TABLES)
    assert run(shared, **TABLES)


def test_distances_are_those_of_a_cache_without_gaps() -> None:
    """The reference is the model itself on the kept tokens, at positions 0, 1, 2 .. (the paper's definition)."""
    torch.manual_seed(0)
    q, k, v = torch.randn(60, 4, 8), *torch.randn(2, 60, 2, 8)
    angles = torch.outer(torch.arange(64.0), 0.3 ** torch.arange(4)).repeat(1, 2)
    cos, sin = angles.cos(), angles.sin()
    op, tables = OPS["paged_attention"].reference, (cos, sin, cos, sin)
    got = op(q, k, v, torch.arange(60), AttentionSpec(0, 0.3, policy=POLICY), *tables)
    for last in (0, 20, 33, 34, 59):
        kept = [i for i in range(last + 1) if i < 2 or i > last - 32]
        at = torch.arange(len(kept))
        full = op(q[kept], k[kept], v[kept], at, AttentionSpec(0, 0.3), *tables)
        assert torch.allclose(got[last], full[-1], atol=1e-5), last

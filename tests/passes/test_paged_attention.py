"""paged-attention."""

from __future__ import annotations

from graph_tracing import Applied, Value, apply, attention, icc, paged_attention, trace
from icc.compiler.graph.graph import attention_spec
from icc.compiler.ops import AttentionMask, AttentionSpec, named_arguments
from icc.passes.attention.paged_attention import PagedAttention

SPEC = AttentionSpec(0, 0.25, AttentionMask(5, 3), softcap=20.0)
TABLES = {"cos": "f32[24, 4]", "sin": "f32[24, 4]"}


def attend(q: Value, k: Value, v: Value) -> Value:
    return attention(q, k, v, AttentionSpec(0, 0.5))


def rope(x: Value, positions: Value, cos: Value, sin: Value, style: str = "half") -> Value:
    rows = [icc.embedding.default(positions, t) for t in (cos, sin)]
    return icc.rope.default(x, *rows, style)


def run(fn: object, **inputs: str) -> Applied:
    return apply(PagedAttention(), trace(fn, positions="", q="f32[T, 4, 8]", k="f32[T, 2, 8]", **inputs))  # type: ignore[arg-type]


def test_rope_is_fused() -> None:
    def fn(positions: Value, q: Value, k: Value, cos: Value, sin: Value) -> Value:
        return attend(rope(q, positions, cos, sin), rope(k, positions, cos, sin), k)

    done = run(fn, **TABLES)
    assert done.counts == {"paged-attention": 1, "fused-rope": 2}


def test_rope_is_seen_through_views() -> None:
    def fn(positions: Value, q: Value, k: Value, cos: Value, sin: Value) -> Value:
        turned = rope(q, positions, cos, sin).view(-1, 2, 2, 8).view(-1, 4, 8)
        return attend(turned, rope(k, positions, cos, sin), k)

    assert run(fn, **TABLES).counts["fused-rope"] == 2


def test_only_one_is_rotated() -> None:
    def fn(positions: Value, q: Value, k: Value, cos: Value, sin: Value) -> Value:
        return attend(rope(q, positions, cos, sin), k, k)

    done = run(fn, **TABLES)
    assert done.counts["fused-rope"] == 1 and "icc::rope" not in done.ops


def test_the_tables_of_q_and_k_may_differ() -> None:
    def fn(positions: Value, q: Value, k: Value, cos: Value, sin: Value) -> Value:
        return attend(rope(q, positions, cos, sin), rope(k, positions, sin, cos), k)

    assert run(fn, **TABLES).counts["fused-rope"] == 2


def test_refuses_two_styles() -> None:
    def fn(positions: Value, q: Value, k: Value, cos: Value, sin: Value) -> Value:
        return attend(rope(q, positions, cos, sin), rope(k, positions, cos, sin, "interleaved"), k)

    done = run(fn, **TABLES)
    assert done.reasons == ["q and k are rotated in ways that one kernel cannot do"]
    assert done.ops.count("icc::rope") == 2 and done.ops.count("icc::paged_attention") == 1


def test_refuses_tables_that_are_not_weights() -> None:
    def fn(positions: Value, q: Value, k: Value, cos: Value, sin: Value) -> Value:
        return attend(icc.rope.default(q, cos, sin, "half"), icc.rope.default(k, cos, sin, "half"), k)

    done = run(fn, cos="f32[T, 8]", sin="f32[T, 8]")
    assert done.counts == {"paged-attention": 1} and done.ops.count("icc::rope") == 2
    assert done.reasons == ["q and k are rotated in ways that one kernel cannot do"]


def test_options_are_kept() -> None:
    def fn(positions: Value, q: Value, k: Value, sinks: Value, alibi: Value) -> Value:
        return attention(q, k, k, SPEC, sinks, alibi)

    done = run(fn, sinks="f32[4]", alibi="f32[4]")
    node = next(n for n in done.graph.nodes if n.target is paged_attention)
    assert attention_spec(node) == SPEC and named_arguments(node)["alibi"] is not None

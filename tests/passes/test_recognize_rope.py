"""recognize-rope."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from graph_tracing import Applied, Value, apply, aten, cat, icc, trace
from icc.passes.attention.recognize_rope import RecognizeRope

Rope = Callable[[Value, Value, Value], Value]


def rotate_half(x: Value, dim: int = 8, axis: int = 2) -> Value:
    return cat([-x.slice(axis, dim // 2, dim), x.slice(axis, 0, dim // 2)], axis)


def rotate_pairs(x: Value, heads: int = 3, dim: int = 8, axis: int = 2) -> Value:
    even, odd = x.slice(axis, 0, dim, 2), x.slice(axis, 1, dim, 2)
    pair = (-1, heads, dim // 2, 1)
    return cat([(-odd).view(*pair), even.view(*pair)], axis + 1).view(-1, heads, dim)


def repeat_pairs(row: Value, dim: int = 8) -> Value:
    """Each value of the first half, twice."""
    half = row.view(-1, 1, dim).slice(2, 0, dim // 2).view(-1, 1, dim // 2, 1)
    return aten.expand.default(half, [-1, 1, dim // 2, 2]).view(-1, 1, dim)


def split_half(x: Value, cos: Value, sin: Value) -> Value:
    a, b = x.slice(2, 0, 4), x.slice(2, 4, 8)
    return cat([a * cos - b * sin, b * cos + a * sin], 2)


def with_tables(rope: Rope) -> Callable[..., Value]:
    def fn(positions: Value, x: Value, cos: Value, sin: Value) -> Value:
        rows = [icc.embedding.default(positions, t) for t in (cos, sin)]
        return rope(x, rows[0].view(-1, 1, *_width(rows[0])), rows[1].view(-1, 1, *_width(rows[1])))

    return fn


def _width(row: Value) -> tuple[int, ...]:
    return row.node.meta["type"].shape[-1:]


def run(rope: Rope, x: str = "f32[T, 3, 8]", table: str = "f32[24, 8]") -> Applied:
    return apply(RecognizeRope(), trace(with_tables(rope), positions="", x=x, cos=table, sin=table))


def partial(inner: Rope, width: int, dim: int = 12) -> Rope:
    def rope(x: Value, cos: Value, sin: Value) -> Value:
        return cat([inner(x.slice(2, 0, width), cos, sin), x.slice(2, width, dim)], 2)

    return rope


FORMS: dict[str, tuple[str, str, Rope]] = {
    "llama": ("f32[T, 3, 8]", "f32[24, 8]", lambda x, cos, sin: x * cos + rotate_half(x) * sin),
    "commuted": ("f32[T, 3, 8]", "f32[24, 8]", lambda x, cos, sin: sin * rotate_half(x) + cos * x),
    "one head": ("f32[T, 1, 8]", "f32[24, 8]", lambda x, cos, sin: x * cos + rotate_half(x) * sin),
    "gpt_oss": ("f32[T, 3, 8]", "f32[24, 4]", split_half),
    "cohere": ("f32[T, 3, 8]", "f32[24, 8]", lambda x, cos, sin: x * cos + rotate_pairs(x) * sin),
    "glm": ("f32[T, 3, 8]", "f32[24, 8]", lambda x, c, s: x * repeat_pairs(c) + rotate_pairs(x) * repeat_pairs(s)),
    "gpt_neox, partial": (
        "f32[T, 3, 12]", "f32[24, 8]", partial(lambda x, cos, sin: x * cos + rotate_half(x) * sin, 8)
    ),
    "gptj, partial": (
        "f32[T, 3, 12]", "f32[24, 8]",
        partial(lambda x, c, s: x * repeat_pairs(c) + rotate_pairs(x) * repeat_pairs(s), 8),
    ),
    "partial by half-width tables": ("f32[T, 3, 12]", "f32[24, 4]", partial(split_half, 8)),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_forms(form: str) -> None:
    shape, table, rope = FORMS[form]
    done = run(rope, shape, table)
    ops = [o for o in done.ops if o not in ("aten::view", "icc::embedding")]
    assert ops == ["icc::rope"] and not done.reasons
    rows = [n for n in done.graph.nodes if n.target is icc.embedding.default and n.args[0].target == "positions"]
    assert [r.meta["type"].shape for r in rows] == [(8,), (8,)]


def test_layers_share_the_rewritten_tables() -> None:
    def twice(x: Value, cos: Value, sin: Value) -> Value:
        for _ in range(3):
            x = x * repeat_pairs(cos) + rotate_pairs(x) * repeat_pairs(sin)
        return x

    assert sorted(run(twice).graph.weights) == ["cos.rope", "sin.rope", "x"]


def test_one_table_for_both() -> None:
    """GPT-J keeps sines and cosines in the halves of one table."""

    def fn(positions: Value, x: Value, table: Value) -> Value:
        row = icc.embedding.default(positions, table)
        sin, cos = row.slice(1, 0, 8).view(-1, 1, 8), row.slice(1, 8, 16).view(-1, 1, 8)
        return x * cos + rotate_half(x) * sin

    done = apply(RecognizeRope(), trace(fn, positions="", x="f32[T, 3, 8]", table="f32[24, 16]"))
    assert done.counts == {"rope-half": 1} and len(done.graph.weights) == 3


def test_refuses_tables_that_tokens_determine() -> None:
    def fn(positions: Value, x: Value, cos: Value, sin: Value) -> Value:
        return x * cos + rotate_half(x) * sin

    graph = trace(fn, positions="", x="f32[T, 3, 8]", cos="f32[T, 1, 8]", sin="f32[T, 1, 8]")
    done = apply(RecognizeRope(), graph)
    assert done.counts == {} and done.reasons == ["cos and sin are not rows of a position table"]


def test_refuses_a_table_of_one_angle() -> None:
    done = run(lambda x, cos, sin: x * cos + rotate_half(x) * sin, table="f32[24, 1]")
    assert done.counts == {} and done.reasons == ["the table's width is not the rotated width"]


def test_refuses_a_table_per_head() -> None:
    def fn(positions: Value, x: Value, cos: Value, sin: Value) -> Value:
        return x * icc.embedding.default(positions, cos) + rotate_half(x) * icc.embedding.default(positions, sin)

    done = apply(RecognizeRope(), trace(fn, positions="", x="f32[T, 3, 8]", cos="f32[24, 3, 8]", sin="f32[24, 3, 8]"))
    assert done.counts == {} and done.reasons == ["the table differs between heads"]


def test_refuses_values_without_heads() -> None:
    def fn(positions: Value, x: Value, cos: Value, sin: Value) -> Value:
        return x * icc.embedding.default(positions, cos) + rotate_half(x, axis=1) * icc.embedding.default(
            positions, sin
        )

    done = apply(RecognizeRope(), trace(fn, positions="", x="f32[T, 8]", cos="f32[24, 8]", sin="f32[24, 8]"))
    assert done.counts == {} and done.reasons == ["there is no head axis"]


def test_refuses_unequal_halves() -> None:
    def uneven(x: Value, cos: Value, sin: Value) -> Value:
        return x * cos + cat([-x.slice(2, 2, 8), x.slice(2, 0, 2)], 2) * sin

    done = run(uneven)
    assert done.counts == {} and done.reasons == ["the halves are not those of the last axis"]


def test_refuses_pairs_that_are_not_stacked() -> None:
    """All odd dims, then all even ones."""

    def joined(x: Value, cos: Value, sin: Value) -> Value:
        return x * cos + cat([-x.slice(2, 1, 8, 2), x.slice(2, 0, 8, 2)], 2) * sin

    done = run(joined)
    assert done.counts == {} and done.reasons == ["the pairs are not stacked next to each other"]


def test_refuses_a_tail_that_is_not_the_rest() -> None:
    def shorter(x: Value, cos: Value, sin: Value) -> Value:
        head = x.slice(2, 0, 8)
        return cat([head * cos + rotate_half(head) * sin, x.slice(2, 8, 10)], 2)

    done = run(shorter, x="f32[T, 3, 12]")
    assert done.counts == {"rope-half": 1} and done.reasons == ["the parts are not those of the last axis"]

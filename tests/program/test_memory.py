"""The memory plan: no two live buffers overlap."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from icc.compiler.program.builder import VirtualBuffer
from icc.compiler.program.memory import ALIGN, plan

spans = st.tuples(st.integers(0, 30), st.integers(0, 12), st.integers(0, 400), st.sampled_from(["f32", "i32", "i8"]))


def buffers_of(drawn: list[tuple[int, int, int, str]]) -> list[VirtualBuffer]:
    return [
        VirtualBuffer(f"b{i}", dtype, size, "tokens", first, first + long)
        for i, (first, long, size, dtype) in enumerate(drawn)
    ]


def padded(buffer: VirtualBuffer) -> int:
    return -(-max(buffer.row_bytes, 1) // ALIGN) * ALIGN


@given(st.lists(spans, max_size=40))
@settings(max_examples=150, deadline=None)
def test_living_buffers_do_not_overlap(drawn: list[tuple[int, int, int, str]]) -> None:
    buffers = buffers_of(drawn)
    offsets, total = plan(buffers)
    assert set(offsets) == {b.name for b in buffers} and total % ALIGN == 0
    for i, one in enumerate(buffers):
        start = offsets[one.name]
        assert start % ALIGN == 0 and 0 <= start <= start + one.row_bytes <= total
        for two in buffers[:i]:
            if one.first <= two.last and two.first <= one.last:
                other = offsets[two.name]
                assert start + padded(one) <= other or other + padded(two) <= start


@given(st.lists(spans, min_size=1, max_size=25))
@settings(max_examples=50, deadline=None)
def test_the_arena_is_between_the_peak_and_the_sum(drawn: list[tuple[int, int, int, str]]) -> None:
    buffers = buffers_of(drawn)
    _, total = plan(buffers)
    peak = max(sum(padded(b) for b in buffers if b.first <= step <= b.last) for step in range(43))
    assert peak <= total <= sum(map(padded, buffers))


def test_the_plan_does_not_depend_on_the_order_of_equals() -> None:
    buffers = buffers_of([(0, 3, 16, "f32"), (1, 3, 16, "f32"), (5, 1, 16, "f32")])
    assert plan(buffers) == plan(list(reversed(buffers)))
    assert plan(buffers) == ({"b0": 0, "b1": 64, "b2": 0}, 128)


def test_nothing_to_place() -> None:
    assert plan([]) == ({}, ALIGN)

"""The normal form of an elementwise kernel walks the same addresses in the same order, and cannot be made smaller."""

from __future__ import annotations

from itertools import pairwise, product
from math import prod

from hypothesis import given
from hypothesis import strategies as st
from icc.compiler.program.placed import Placed, contiguous
from icc.compiler.program.strides import Access, merge, normalize, view_strides

SHAPES = st.lists(st.integers(1, 4), max_size=5).map(tuple)


def addresses(shape: tuple[int, ...], strides: tuple[int, ...]) -> list[int]:
    """The addresses of all elements, in row-major order."""
    return [sum(i * s for i, s in zip(at, strides, strict=True)) for at in product(*map(range, shape))]


@st.composite
def walks(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """A shape, and views of it: contiguous, padded, permuted, broadcast along some dims, or with any strides."""
    shape = draw(SHAPES)
    views = []
    for _ in range(draw(st.integers(1, 3))):
        order = draw(st.permutations(range(len(shape))))
        padding = [draw(st.sampled_from([0, 0, 0, 1])) for _ in shape]
        strides, step = [0] * len(shape), draw(st.integers(1, 2))
        for d in draw(st.sampled_from([list(range(len(shape)))[::-1], list(order)])):
            strides[d] = step
            step *= shape[d] + padding[d]
        free = draw(st.lists(st.sampled_from([None, None, None, 0, 1, 3]), min_size=len(shape), max_size=len(shape)))
        views.append(tuple(s if f is None else f for s, f in zip(strides, free, strict=True)))
    return shape, views


@given(walks())
def test_the_normal_form_walks_the_same_addresses(case: tuple[tuple[int, ...], list[tuple[int, ...]]]) -> None:
    shape, views = case
    accesses = [Access("f32", 7 * i, strides) for i, strides in enumerate(views)]
    sizes, found = normalize(shape, accesses)
    for before, after in zip(accesses, found, strict=True):
        assert addresses(sizes, after.strides) == addresses(shape, before.strides)
        assert (after.dtype, after.row_stride) == (before.dtype, before.row_stride)
    assert 1 not in sizes
    for d, (_, inner) in enumerate(pairwise(sizes)):
        assert any(a.strides[d] != a.strides[d + 1] * inner for a in found), "two dims that could be one"
    assert normalize(sizes, found) == (sizes, found)


def test_merge() -> None:
    assert merge([2, 1, 3, 4], [[12, 12, 4, 1], [0, 0, 0, 1]]) == ((6, 4), [(4, 1), (0, 1)])
    assert merge([], [[]]) == merge([1, 1], [[5, 1]]) == ((), [()])
    assert merge([2, 3], []) == ((6,), [])


@given(walks(), st.data())
def test_a_view_has_the_addresses_of_what_it_views(
    case: tuple[tuple[int, ...], list[tuple[int, ...]]], data: st.DataObject
) -> None:
    shape, (strides, *_) = case
    rows = data.draw(st.sampled_from([n for n in range(1, prod(shape) + 1) if prod(shape) % n == 0]))
    target = (rows, prod(shape) // rows)
    found = view_strides(shape, strides, target)
    wanted = addresses(shape, strides)
    if found is not None:
        assert addresses(target, found) == wanted
    else:  # no strides fit: the first steps along both axes would decide them
        row, column = (wanted[target[1]] if rows > 1 else 0), (wanted[1] if target[1] > 1 else 0)
        assert addresses(target, (row, column)) != wanted


@given(SHAPES, st.data())
def test_a_broadcast_value_is_walked_with_zeros(shape: tuple[int, ...], data: st.DataObject) -> None:
    own = tuple(data.draw(st.sampled_from([1, n])) for n in shape[data.draw(st.integers(0, len(shape))) :])
    for rows in ("tokens", ""):
        value = Placed("buffer", "b0", 0, own, contiguous(own), 99, "bf16", rows)
        strides = value.strides_over(shape)
        wide = (1,) * (len(shape) - len(own)) + own
        places = [
            tuple(0 if n == 1 else i for i, n in zip(at, wide, strict=True)) for at in product(*map(range, shape))
        ]
        base = {at: i for i, at in enumerate(product(*map(range, wide)))}
        assert addresses(shape, strides) == [base[at] for at in places]

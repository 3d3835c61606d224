"""Shape ops as arithmetic on strides: Placed describes the same elements that torch computes."""

from __future__ import annotations

from math import prod

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from icc.compiler.program.placed import Placed, contiguous
from torch import Tensor

TOKENS = 3


def read(placed: Placed, base: np.ndarray) -> np.ndarray:
    """The elements that `placed` describes, [TOKENS, *shape]."""
    strides = [s * base.itemsize for s in (placed.row_stride, *placed.strides)]
    return np.lib.stride_tricks.as_strided(base[placed.offset :], (TOKENS, *placed.shape), strides)


def divisions(size: int) -> list[int]:
    return [n for n in range(1, size + 1) if size % n == 0]


def draw_view(data: st.DataObject, shape: tuple[int, ...]) -> tuple[int, ...]:
    left, target = prod(shape), []
    while left > 1 and len(target) < 3:
        target.append(data.draw(st.sampled_from(divisions(left))))
        left //= target[-1]
    return (*target, left) if left > 1 or not target else tuple(target)


def step(data: st.DataObject, placed: Placed, value: Tensor) -> tuple[Placed, Tensor]:
    """Apply one random shape op to both; views that need a copy are skipped, because the lowering copies there."""
    shape, rank = placed.shape, len(placed.shape)
    kind = data.draw(st.sampled_from(["view", "permute", "slice", "expand"]))
    if kind == "view":
        target = draw_view(data, shape)
        found = placed.view(target)
        if found is None:
            assert not _viewable(value, target), "a view without a copy exists"
            return placed, value
        return found, value.reshape(-1, *target)
    if kind == "permute":
        order = data.draw(st.permutations(range(rank)))
        return placed.permute(list(order)), value.permute(0, *(i + 1 for i in order))
    if kind == "slice":
        axis = data.draw(st.integers(0, rank - 1))
        start = data.draw(st.integers(0, shape[axis] - 1))
        end = data.draw(st.integers(start + 1, shape[axis]))
        jump = data.draw(st.integers(1, 3))
        return placed.slice(axis, start, end, jump), torch.ops.aten.slice.Tensor(value, axis + 1, start, end, jump)
    wide = tuple(data.draw(st.integers(1, 3)) if n == 1 else n for n in shape)
    return placed.expand(wide), value.expand(-1, *wide)


def _viewable(value: Tensor, target: tuple[int, ...]) -> bool:
    """Whether torch can view one row in that shape."""
    try:
        value[0].view(target)
    except RuntimeError:
        return False
    return True


@given(st.data(), st.lists(st.integers(1, 5), min_size=1, max_size=3), st.integers(0, 5))
@settings(max_examples=150, deadline=None)
def test_chains_of_shape_ops(data: st.DataObject, sizes: list[int], padding: int) -> None:
    shape = tuple(sizes)
    width = prod(shape) + padding
    base = np.arange(TOKENS * width, dtype=np.float32)
    placed = Placed("buffer", "b0", 0, shape, contiguous(shape), width, "f32", "tokens")
    value = torch.from_numpy(read(placed, base).copy())
    for _ in range(data.draw(st.integers(1, 6))):
        placed, value = step(data, placed, value)
        assert placed.shape == tuple(value.shape[1:])
        assert np.array_equal(read(placed, base), value.numpy())
        if placed.is_dense:
            assert np.array_equal(read(placed.view((placed.size,)) or placed, base), value.reshape(TOKENS, -1).numpy())

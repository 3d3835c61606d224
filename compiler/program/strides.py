"""The normal form of views over one shape: no dims of size 1, and no two neighbouring dims that could be merged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Access:
    """How a kernel walks one operand: element (i, j, ...) of row r lies at r * row_stride + i * s0 + j * s1 + ...

    `strides` has one entry per dim of the kernel's shape, in elements; 0 if the operand is broadcast. `row_stride` is 0
    if the operand is the same in all rows. `dtype` is its element type.
    """

    dtype: str
    row_stride: int
    strides: tuple[int, ...]


def merge(shape: Sequence[int], strides: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """Sizes and every view's strides without dims of size 1; neighbouring dims that all views walk with one stride are
    merged.

    The elements keep their order and addresses. A shape of one element has no dims left.
    """
    sizes: list[int] = []
    kept: list[list[int]] = []  # per remaining dim, the stride of each view
    for size, *steps in zip(shape, *strides, strict=True):
        if size == 1:
            continue
        if sizes and kept[-1] == [step * size for step in steps]:
            sizes[-1] *= size
            kept[-1] = steps
        else:
            sizes.append(size)
            kept.append(steps)
    return tuple(sizes), [tuple(steps[i] for steps in kept) for i in range(len(strides))]


def normalize(shape: Sequence[int], accesses: Sequence[Access]) -> tuple[tuple[int, ...], tuple[Access, ...]]:
    """A kernel's shape and operands in normal form, the only form that back ends must walk.

    ValueError for an operand that does not have one stride per dim.
    """
    for access in accesses:
        if len(access.strides) != len(shape):
            raise ValueError(f"operand {access} does not fit shape {list(shape)}")
    sizes, strides = merge(shape, [access.strides for access in accesses])
    return sizes, tuple(replace(access, strides=s) for access, s in zip(accesses, strides, strict=True))


def view_strides(shape: Sequence[int], strides: Sequence[int], target: Sequence[int]) -> tuple[int, ...] | None:
    """Strides of `target` over the same memory, as torch's view computes them; None if there are none."""
    sizes, (steps,) = merge(shape, [strides])
    pending = list(zip(sizes, steps, strict=True))
    left, step = pending.pop() if pending else (1, 1)
    result: list[int] = []
    for size in reversed(target):
        if size == 1:
            result.append(step)
            continue
        while left == 1 and pending:
            left, step = pending.pop()
        if left % size:
            return None
        result.append(step)
        left //= size
        step *= size
    return tuple(reversed(result))

"""Where a value lies: a base operand and, per row, an offset and strides. Shape ops are arithmetic on these."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from ...runtime.format.program import Operand


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides in elements."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


@dataclass(frozen=True)
class Placed:
    """A tensor as a view. `shape` and `strides` are per row, in elements; `row_stride` is 0 for constants.

    `rows` is "tokens" or "logit_rows", or "" for constants.
    """

    space: str
    name: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    row_stride: int
    dtype: str
    rows: str

    @property
    def operand(self) -> Operand:
        """The program's form of the base address."""
        return Operand(self.space, self.name, self.offset)

    @property
    def size(self) -> int:
        """Elements per row."""
        return prod(self.shape)

    @property
    def is_dense(self) -> bool:
        """Whether a row's elements are contiguous (the rows themselves may be apart)."""
        wanted = contiguous(self.shape)
        return all(size == 1 or a == b for size, a, b in zip(self.shape, self.strides, wanted, strict=True))

    def view(self, shape: tuple[int, ...]) -> Placed | None:
        """The same elements under another shape, or None where that needs a copy."""
        strides = _view_strides(self.shape, self.strides, shape)
        return None if strides is None else replace(self, shape=shape, strides=strides)

    def permute(self, order: list[int]) -> Placed:
        """Axes in another order (row axis excluded)."""
        return replace(self, shape=tuple(self.shape[i] for i in order), strides=tuple(self.strides[i] for i in order))

    def expand(self, shape: tuple[int, ...]) -> Placed:
        """Broadcast to `shape`, from the right."""
        lead = len(shape) - len(self.shape)
        strides = [0] * lead
        strides += [
            s if have == want else 0 for s, have, want in zip(self.strides, self.shape, shape[lead:], strict=True)
        ]
        return replace(self, shape=shape, strides=tuple(strides))

    def slice(self, axis: int, start: int, end: int, step: int) -> Placed:
        """Elements start, start + step, ... below end of one axis."""
        shape, strides = list(self.shape), list(self.strides)
        moved = self.offset + start * strides[axis]
        shape[axis] = max(0, -(-(end - start) // step))
        strides[axis] *= step
        return replace(self, offset=moved, shape=tuple(shape), strides=tuple(strides))


def _view_strides(shape: tuple[int, ...], strides: tuple[int, ...], target: tuple[int, ...]) -> tuple[int, ...] | None:
    """Strides of `target` over the same memory, as torch's view computes them; None if there are none."""
    groups: list[tuple[int, int]] = []  # (size, innermost stride) of maximal contiguous groups
    for size, stride in zip(shape, strides, strict=True):
        if size == 1:
            continue
        if groups and groups[-1][1] == size * stride:
            groups[-1] = (groups[-1][0] * size, stride)
        else:
            groups.append((size, stride))
    result: list[int] = []
    pending = list(reversed(groups))
    left, step = pending.pop(0) if pending else (1, 1)
    for size in reversed(target):
        if size == 1:
            result.append(step)
            continue
        while left == 1 and pending:
            left, step = pending.pop(0)
        if left % size:
            return None
        result.append(step)
        left //= size
        step *= size
    return tuple(reversed(result))

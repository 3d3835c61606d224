"""The place of a value: a base operand and, per row, an offset and strides. Shape ops are arithmetic on these."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Literal

from ...runtime.format.operands import BufferOperand, InputOperand, Operand, OutputOperand, WeightOperand
from .strides import view_strides


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

    `rows` is "tokens" or "logit_rows", or "" for constants. `space`: see `operands.py` of the format.
    """

    space: Literal["buffer", "weight", "input", "output"]
    name: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    row_stride: int
    dtype: str
    rows: str

    @property
    def operand(self) -> Operand:
        """The value as an operand of a step: its place, its element type, and the distance of its rows."""
        match self.space:
            case "buffer":
                return BufferOperand(self.name, self.dtype, self.row_stride, self.offset)
            case "weight":
                return WeightOperand(self.name, self.dtype, self.offset)
            case "input":
                return InputOperand(self.name, self.dtype, self.row_stride, self.offset)
            case "output":
                assert not self.offset
                return OutputOperand(self.name, self.dtype, self.row_stride)

    @property
    def size(self) -> int:
        """Elements per row."""
        return prod(self.shape)

    @property
    def is_dense(self) -> bool:
        """Whether a row's elements are contiguous (the rows themselves may be apart)."""
        wanted = contiguous(self.shape)
        return all(size == 1 or a == b for size, a, b in zip(self.shape, self.strides, wanted, strict=True))

    @property
    def is_whole(self) -> bool:
        """Whether the value is its whole base: contiguous rows from its beginning."""
        return self.is_dense and not self.offset and self.row_stride == self.size

    def strides_over(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The strides by which an elementwise kernel over `shape` walks the value, broadcast to it."""
        return tuple(0 if n == 1 else s for n, s in zip(shape, self.expand(shape).strides, strict=True))

    def view(self, shape: tuple[int, ...]) -> Placed | None:
        """This value's elements in another shape; None if that needs a copy."""
        strides = view_strides(self.shape, self.strides, shape)
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

"""How an elementwise kernel, or the epilogue of a product, walks its operands."""

from __future__ import annotations

import msgspec


class Access(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="access"):
    """One operand over the kernel's shape: element (i, j, ...) of row r lies at r * row_stride + i * s0 + j * s1 + ...

    `strides` has one entry per dim of the shape, in elements; 0 where the operand is broadcast, as `row_stride` is
    where it is the same in all rows. `dtype` is its element type: f32, bf16, f16, i32 or bool.
    """

    dtype: str
    row_stride: int
    strides: tuple[int, ...]


class Columns(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="columns"):
    """What an epilogue reads of its product: for column c of the result, column `offset + stride * c`."""

    offset: int
    stride: int

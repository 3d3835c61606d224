"""Where a kernel finds one argument: a view of a buffer, a weight, a field of the batch, or a result of the program."""

from __future__ import annotations

from typing import ClassVar

import msgspec


class BufferOperand(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="space", tag="buffer"):
    """A view of a buffer: `offset` elements into each row; the rows begin `stride` elements after each other."""

    name: str
    dtype: str
    stride: int
    offset: int = 0


class WeightOperand(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="space", tag="weight"):
    """A weight, or what lies `offset` elements into it. `dtype` of packed ones is u8: they are bytes to all but a
    kernel that knows their format."""

    name: str
    dtype: str
    offset: int = 0
    stride: ClassVar[int] = 0  # the same for all rows


class InputOperand(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag_field="space", tag="input"
):
    """An array of the batch that has one row per token: token_ids, positions, or one that the program declares. Its
    rows are `stride` elements apart; `offset` elements into each begins what is read."""

    name: str
    dtype: str = "i32"
    stride: int = 1
    offset: int = 0


class OutputOperand(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="space", tag="output"):
    """A result of the program by its name: LOGITS, float32 [logit_rows, vocab]. In programs of format 2 also DRAFTS,
    int32 [logit_rows, heads, ranks]."""

    name: str
    dtype: str
    stride: int
    offset: ClassVar[int] = 0


# Where a kernel finds one argument. An optional one that is absent is None, or not there.
Operand = BufferOperand | WeightOperand | InputOperand | OutputOperand

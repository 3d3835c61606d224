"""The operands of a kernel: a view of a buffer, a weight, an array of the batch, or a result of the program."""

from __future__ import annotations

from typing import ClassVar

import msgspec


class BufferOperand(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="space", tag="buffer"):
    """A view of a buffer: it begins `offset` elements into each row; rows are `stride` elements apart."""

    name: str
    dtype: str
    stride: int
    offset: int = 0


class WeightOperand(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="space", tag="weight"):
    """A weight, from element `offset` on. `dtype` is u8 for a packed weight: it is bytes, except to kernels that know
    its format."""

    name: str
    dtype: str
    offset: int = 0
    stride: ClassVar[int] = 0  # the same for all rows


class InputOperand(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag_field="space", tag="input"
):
    """An array of the batch that has one row per token: token_ids, positions, or one that the program declares. Its
    rows are `stride` elements apart; reading begins `offset` elements into each."""

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


# An operand of a kernel. An optional operand that is absent is None, or left out.
Operand = BufferOperand | WeightOperand | InputOperand | OutputOperand

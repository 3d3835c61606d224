"""Lets a norm write what it makes in 8 bits, too, for the products that read it so: a kernel less before each of them.

y = rms_norm(x, w); h = linear(y, W)   ->   y, codes = rms_norm(x, w, coding=fp8); h = linear(y, codes, W)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec

from ...runtime.format.operands import BufferOperand, Operand
from ..weights.formats.base import StorageFormat
from .builder import ProgramBuilder, Record
from .steps.base import CodedRows
from .steps.linear import RowProduct
from .steps.norm import Norm

MICRO_STEP = 128  # values of MXFP8 whose powers of two lie in a word; rows of these are padded to words


def micro_words(k: int) -> int:
    """Words of powers of two of a row of K values."""
    return -(-k // MICRO_STEP)


def code_rows(builder: ProgramBuilder, coding: Callable[[StorageFormat], str]) -> None:
    """Rewrite the builder's records. coding: what rows become that are multiplied with a format; "" if they stay."""
    records = builder.records
    makers = {y: at for at, record in enumerate(records) if (y := _normed(record)) is not None}
    made: dict[int, tuple[str, CodedRows]] = {}
    for at, record in enumerate(records):
        step = record.step
        maker = makers.get(step.x, at) if isinstance(step, RowProduct) and isinstance(step.x, BufferOperand) else at
        if maker >= at or not isinstance(step, RowProduct):
            continue
        kind, rows = coding(step.stored.storage), records[maker].step.rows
        if not kind or step.rows != rows or made.get(maker, (kind,))[0] != kind:
            continue
        if maker not in made:
            made[maker] = kind, _buffers(builder, step.k, kind, rows)
            records[maker] = _coded(records[maker], *made[maker])
        records[at] = replace(record, step=msgspec.structs.replace(records[at].step, x_coded=made[maker][1]))


def _normed(record: Record) -> Operand | None:
    """The whole rows that a step normalizes, if it does."""
    step = record.step
    if isinstance(step, RowProduct):
        return step.norm_out.y if step.norm_out is not None else None
    return step.y if isinstance(step, Norm) and step.groups == 1 else None  # type: ignore[attr-defined]


def _buffers(builder: ProgramBuilder, k: int, kind: str, rows: str) -> CodedRows:
    codes = builder.buffer((k,), "i8" if kind == "int8" else "u8", rows)
    scales = builder.buffer((micro_words(k),), "i32", rows) if kind == "mxfp8" else builder.buffer((1,), "f32", rows)
    return CodedRows(codes.operand, scales.operand)


def _coded(record: Record, kind: str, coded: CodedRows) -> Record:
    step = record.step
    if isinstance(step, RowProduct) and step.norm_out is not None:
        outs = msgspec.structs.replace(step.norm_out, codes=coded.codes, scales=coded.scales)
        return replace(record, step=msgspec.structs.replace(step, norm_out=outs, coding=kind))
    return replace(record, step=msgspec.structs.replace(step, coded=coded, coding=kind))

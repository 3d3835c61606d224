"""Lets a norm also write its result in 8 bits, for the products that read it in 8 bits, which saves a kernel before
each of them.

y = rms_norm(x, w); h = linear(y, W)   ->   y, codes = rms_norm(x, w, coding=fp8); h = linear(y, codes, W)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import msgspec

from ...runtime.format.operands import BufferOperand, Operand
from .builder import ProgramBuilder, Record
from .profile import Profile
from .rewrite import StepRewrite
from .steps.base import CodedRows
from .steps.collective import GatherRows
from .steps.linear import RowProduct
from .steps.norm import Norm

MICRO_STEP = 128  # values of MXFP8 whose powers of two share a word; rows of powers are padded to words


def micro_words(k: int) -> int:
    """Words of powers of two of a row of K values."""
    return -(-k // MICRO_STEP)


@dataclass(frozen=True)
class CodeRows(StepRewrite):
    """A norm whose rows are multiplied in 8 bits also writes them in 8 bits; not if ranks gather rows between the norm
    and the product, because then each rank has normalized only some rows."""

    name: ClassVar[str] = "code-rows"

    def applies(self, profile: Profile) -> bool:
        return profile.coding is not None

    def run(self, builder: ProgramBuilder, profile: Profile) -> int:
        assert profile.coding is not None
        records = builder.records
        gathered = {record.step.y for record in records if isinstance(record.step, GatherRows)}
        normed = {y: at for at, record in enumerate(records) if (y := _normed(record)) is not None}
        makers = {y: at for y, at in normed.items() if y not in gathered}
        count = 0
        made: dict[int, tuple[str, CodedRows]] = {}
        for at, record in enumerate(records):
            step = record.step
            maker = makers.get(step.x, at) if isinstance(step, RowProduct) and isinstance(step.x, BufferOperand) else at
            if maker >= at or not isinstance(step, RowProduct) or step.x_coded is not None:
                continue
            kind, rows = profile.coding(step.stored.storage), records[maker].step.rows
            if not kind or step.rows != rows or made.get(maker, (kind,))[0] != kind:
                continue
            if maker not in made:
                made[maker] = kind, _buffers(builder, step.k, kind, rows)
                records[maker] = _coded(records[maker], *made[maker])
            records[at] = replace(record, step=msgspec.structs.replace(records[at].step, x_coded=made[maker][1]))
            count += 1
        return count


def _normed(record: Record) -> Operand | None:
    """The result of a step that normalizes whole rows; None for other steps."""
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

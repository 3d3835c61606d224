"""The base of all steps: a kernel's name, the kind of their rows, and operands in the order of their declaration.

A step states everything that its kernel depends on except the tiling. Operands carry their element type and the
distance of their rows, so no step repeats these. Steps that differ only in where operands lie share a kernel.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from functools import cache
from typing import Any, ClassVar, Literal, TypeVar, get_args

import msgspec

from ....runtime.format import program as format
from ....runtime.format.elements import ITEM_SIZE
from ....runtime.format.operands import BufferOperand, InputOperand, Operand, OutputOperand, WeightOperand

Rows = Literal["tokens", "logit_rows"]
FLOATS = ("f32", "bf16", "f16")
VALUES = (*FLOATS, "i32")
_OPERANDS = (BufferOperand, WeightOperand, InputOperand, OutputOperand)


class OperandGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="space"):
    """Operands that together are one argument of an op."""


class QuantizedRows(OperandGroup, frozen=True, tag="quantized"):
    """Rows as int8 codes [K], with float32 scales [K / group], and sums of codes or, for unsigned codes, zero
    points."""

    codes: Operand
    scales: Operand
    sums: Operand


class CodedRows(OperandGroup, frozen=True, tag="coded"):
    """Rows in 8 bits in the form that a GPU's matrix units read: codes [K], and their scales: one float32 per row, or
    one power of two per 32 values, four to an i32."""

    codes: Operand
    scales: Operand


CODED = ("u8", "i8", "f32", "i32")


class Step(format.Step, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, tag_field="op"):
    """One lowered op. Fields that hold an operand (or several, or None if it is optional) are its operands.

    rows: the kind of its results' rows. layer: the KV layer that it reads or writes, -1 for none.
    """

    OUTPUTS: ClassVar[tuple[str, ...]] = ("y",)  # the fields that are written; all other operands are read
    EXTRA: ClassVar[tuple[str, ...]] = ()  # operands that only some back ends have, left out if absent
    DTYPES: ClassVar[Mapping[str, tuple[str, ...]]] = {}  # element types of operands that may not be just any float
    rows: Rows = "tokens"
    layer: int = -1

    @property
    def op(self) -> str:
        """The op's name, as in program.json."""
        return op_name(type(self))

    @property
    def inputs(self) -> dict[str, Operand | None]:
        """The operands that are read, in order; None if absent. Parts of a group or a tuple have names such as
        "args.0"."""
        return dict(self._slots(written=False))

    @property
    def outputs(self) -> dict[str, Operand | None]:
        """The operands that are written, in order; None if absent."""
        return dict(self._slots(written=True))

    @property
    def operands(self) -> dict[str, Operand]:
        """All operands that are present, inputs first."""
        return {name: o for name, o in (self.inputs | self.outputs).items() if o is not None}

    def rows_of(self, name: str) -> tuple[Rows, ...]:
        """The kinds of rows that an operand, if it is no weight, may have."""
        return (self.rows,)

    def widths(self) -> dict[str, int]:
        """How many elements of its row each operand covers (for a weight: in all). Operands whose extent depends on a
        kernel, such as packed weights, are left out."""
        return {}

    def problem(self) -> str:
        """Why no back end could make a kernel for the step: facts that contradict each other; "" if it is
        consistent."""
        return ""

    def dtypes_of(self, name: str) -> tuple[str, ...]:
        """The element types that an operand may have."""
        return self.DTYPES.get(name.split(".")[0], FLOATS)

    def _slots(self, written: bool) -> Iterator[tuple[str, Operand | None]]:
        for name in operand_fields(type(self)):
            absent = name in self.EXTRA and getattr(self, name) is None
            if (name in self.OUTPUTS) == written and not absent:
                yield from _flatten(name, getattr(self, name))


def _flatten(
    name: str, value: Operand | OperandGroup | tuple[Operand, ...] | None
) -> Iterator[tuple[str, Operand | None]]:
    if isinstance(value, tuple):
        for number, part in enumerate(value):
            yield f"{name}.{number}", part
    elif isinstance(value, OperandGroup):
        for part in value.__struct_fields__:
            yield f"{name}.{part}", getattr(value, part)
    else:
        yield name, value


@cache
def operand_fields(step: type[Step]) -> tuple[str, ...]:
    """The fields that hold operands, in the order of their declaration."""
    return tuple(field.name for field in msgspec.structs.fields(step) if _holds_operand(field.type))


def _holds_operand(kind: Any) -> bool:
    if isinstance(kind, type):
        return issubclass(kind, (*_OPERANDS, OperandGroup))
    return any(map(_holds_operand, get_args(kind)))


def op_name(step: type[Step]) -> str:
    """The name of the op that a class of steps is for."""
    return str(step.__struct_config__.tag)


def begins_aligned(operand: Operand | None) -> bool:
    """Whether an operand's rows begin at multiples of 16 bytes, provided that its buffer does; True for None."""
    return operand is None or operand.offset * ITEM_SIZE[operand.dtype] % 16 == 0


def kernel_key(step: Step, by_alignment: bool) -> Hashable:
    """A key that is equal for steps that can share a kernel: everything except the places of operands. by_alignment:
    the key includes whether an operand's rows begin at multiples of 16 bytes."""
    places = {"kernel", "layer", *operand_fields(type(step))}
    facts = tuple(getattr(step, name) for name in step.__struct_fields__ if name not in places)
    operands = tuple(
        (name, o and (o.dtype, o.stride), by_alignment and begins_aligned(o))
        for name, o in (step.inputs | step.outputs).items()
    )
    return step.op, facts, operands


STEPS: dict[str, type[Step]] = {}
S = TypeVar("S", bound=type[Step])


def step_type(cls: S) -> S:
    """Decorator: registers a step, so that a program with it can be read. ValueError if its op is taken."""
    if STEPS.setdefault(op_name(cls), cls) is not cls:
        raise ValueError(f"there is a step of op {op_name(cls)!r} already")
    return cls

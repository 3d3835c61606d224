"""The values that the epilogue of a product reads, as names in the rendered source."""

from __future__ import annotations

from dataclasses import dataclass

from ....program.steps import linear as steps
from .body import TritonValue


@dataclass(frozen=True)
class ColumnPart:
    """steps.Columns `offset + stride * c` of the product that the epilogue reads, as names in the source."""

    offset: int
    stride: int
    number: int

    @property
    def acc(self) -> str:
        """The name of the finished product."""
        return f"acc{self.number}"

    @property
    def sum(self) -> str:
        """The name of the product of each warp."""
        return f"sum{self.number}"

    @property
    def row(self) -> str:
        """The name of the first row of W of the program."""
        return f"row{self.number}"

    @property
    def w(self) -> str:
        """A block of W, or of its codes."""
        return f"w{self.number}"

    @property
    def word(self) -> str:
        """The words of a block of codes."""
        return f"word{self.number}"


@dataclass(frozen=True)
class ExtraOperand:
    """Another operand of the epilogue."""

    name: str
    row_stride: int
    column_stride: int
    kind: str  # "f" or "i"

    @property
    def convert(self) -> str:
        """The code that converts a loaded value to a type of the body."""
        return ".to(tl.float32)" if self.kind == "f" else ""


@dataclass(frozen=True)
class ChangePiece:
    """The term that adapters add to the columns from `begin` to `end`, from the product's operands numbered
    `number`."""

    number: int
    begin: int
    end: int
    low_stride: int

    @property
    def columns(self) -> int:
        """Rows of a slot of `up`."""
        return self.end - self.begin


@dataclass(frozen=True)
class ChangeOperand:
    """steps.AdapterChange, as names in the source. wide: whether its operands have different types and are multiplied
    in float32."""

    name: str
    pieces: tuple[ChangePiece, ...]
    rank: int
    slots: int
    wide: bool


@dataclass(frozen=True)
class EpilogueOperands:
    """Parts of the product, other operands, the terms of adapters, and each input of the epilogue as a value."""

    parts: tuple[ColumnPart, ...]
    extras: tuple[ExtraOperand, ...] = ()
    changes: tuple[ChangeOperand, ...] = ()
    arguments: tuple[TritonValue, ...] = ()

    @property
    def beside(self) -> int:
        """How many values each value of the result needs besides the parts of the product."""
        return len(self.extras) + len(self.changes)


def epilogue_operands(step: steps.Product) -> EpilogueOperands:
    """The operands of the step's epilogue; of a step without one, the product itself."""
    epilogue = step.epilogue
    if epilogue is None:
        return EpilogueOperands((ColumnPart(0, 1, 0),))
    parts: dict[steps.Columns, ColumnPart] = {}
    extras: list[ExtraOperand] = []
    changes: list[ChangeOperand] = []
    arguments: list[TritonValue] = []
    for operand in epilogue.inputs:
        if isinstance(operand, steps.Columns):
            part = parts.setdefault(operand, ColumnPart(operand.offset, operand.stride, len(parts)))
            arguments.append(TritonValue(part.acc, "f"))
        elif isinstance(operand, steps.AdapterChange):
            assert isinstance(step, steps.RowProduct)
            changes.append(_change(step, operand, changes))
            arguments.append(TritonValue(changes[-1].name, "f"))
        else:
            found = step.extras[len(extras)]
            kind = "i" if found.dtype == "i32" else "f"
            extras.append(ExtraOperand(f"e{len(extras)}", found.stride, operand.stride, kind))
            arguments.append(TritonValue(extras[-1].name, kind))
    return EpilogueOperands(tuple(parts.values()), tuple(extras), tuple(changes), tuple(arguments))


def _change(step: steps.RowProduct, change: steps.AdapterChange, before: list[ChangeOperand]) -> ChangeOperand:
    first = sum(len(other.pieces) for other in before)
    pieces: list[ChangePiece] = []
    for begin, end in change.spans:
        number = first + len(pieces)
        pieces.append(ChangePiece(number, begin, end, step.low[number].stride))
    wide = len({o.dtype for o in (*step.low, *step.up)}) > 1
    return ChangeOperand(f"change{len(before)}", tuple(pieces), change.rank, change.slots, wide)

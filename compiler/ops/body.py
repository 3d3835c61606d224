"""The body of an elementwise kernel: instructions over scalars, in single assignment form.

In a graph a body is text, `t0 = silu a0; t1 = mul t0 a1`: a<i> is input i, t<j> the value of instruction j, anything
else a number; the last value is the result. Only `Body.parse` reads that text and only `str` writes it; code that
composes, runs or renders a body works on the object.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import TypeVar

import msgspec

Number = bool | int | float
T = TypeVar("T")

_PLACE = re.compile(r"[at](0|[1-9][0-9]*)")


class Argument(msgspec.Struct, frozen=True, array_like=True, tag="a"):
    """An input of the kernel."""

    index: int

    def __str__(self) -> str:
        return f"a{self.index}"


class Register(msgspec.Struct, frozen=True, array_like=True, tag="t"):
    """The value of an earlier instruction."""

    index: int

    def __str__(self) -> str:
        return f"t{self.index}"


class Literal(msgspec.Struct, frozen=True, array_like=True, tag="number"):
    """A number. Literals are equal if their texts are: 1, 1.0 and True differ, 0.0 and -0.0 too, and a NaN equals
    itself."""

    text: str

    @staticmethod
    def of(value: Number) -> Literal:
        """A number as a literal, written so that it reads back exactly."""
        return Literal(repr(value))

    @staticmethod
    def parse(text: str) -> Literal:
        """Parse a number; one without a point is an integer. ValueError if the text is not a number."""
        if text in ("True", "False"):
            return Literal(text)
        if text.removeprefix("-").isdecimal():
            return Literal.of(int(text))
        try:
            return Literal.of(float(text))
        except ValueError:
            raise ValueError(f"{text!r} is neither an operand nor a number") from None

    @property
    def value(self) -> Number:
        """The number."""
        if self.text in ("True", "False"):
            return self.text == "True"
        return int(self.text) if self.text.removeprefix("-").isdecimal() else float(self.text)

    def __str__(self) -> str:
        return self.text


Operand = Argument | Register | Literal


class Instruction(msgspec.Struct, frozen=True, array_like=True):
    """One opcode of `pointwise.OPCODES` and its operands."""

    opcode: str
    operands: tuple[Operand, ...]

    def __str__(self) -> str:
        return " ".join([self.opcode, *map(str, self.operands)])


class Body(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Instruction j assigns register j; the last one is the result. ValueError if there is no instruction, or one reads
    a later register."""

    instructions: tuple[Instruction, ...]

    def __post_init__(self) -> None:
        if not self.instructions:
            raise ValueError("a body without instructions")
        for number, instruction in enumerate(self.instructions):
            for operand in instruction.operands:
                if isinstance(operand, Register) and operand.index >= number:
                    raise ValueError(f"t{number} = {instruction}: {operand} has no value yet")

    @staticmethod
    def parse(text: str) -> Body:
        """Parse a body's text; ValueError names the part that cannot be read."""
        return _parse(text)

    def __str__(self) -> str:
        return "; ".join(f"t{number} = {instruction}" for number, instruction in enumerate(self.instructions))

    @property
    def num_arguments(self) -> int:
        """How many inputs the body needs: one more than the highest index that it reads."""
        read = (o.index for i in self.instructions for o in i.operands if isinstance(o, Argument))
        return max(read, default=-1) + 1

    def evaluate(
        self,
        arguments: Sequence[T],
        literal: Callable[[Number], T],
        apply: Callable[[str, str, list[T]], T],
    ) -> T:
        """The result, computed from the inputs, with `literal` for numbers and `apply(register, opcode, operands)`,
        called in order.

        Values may be of any kind: tensors, expressions of a source, operands of a larger body. ValueError if the body
        reads an input that is not given.
        """
        if self.num_arguments > len(arguments):
            raise ValueError(f"the body reads a{self.num_arguments - 1} of {len(arguments)} inputs")
        values: list[T] = []

        def value(operand: Operand) -> T:
            if isinstance(operand, Literal):
                return literal(operand.value)
            return arguments[operand.index] if isinstance(operand, Argument) else values[operand.index]

        for number, instruction in enumerate(self.instructions):
            values.append(apply(f"t{number}", instruction.opcode, [value(o) for o in instruction.operands]))
        return values[-1]


@cache
def _parse(text: str) -> Body:
    instructions = []
    for number, line in enumerate(text.split("; ")):
        target, _, right = line.partition(" = ")
        opcode, *operands = right.split() or [""]
        if target != f"t{number}" or not opcode:
            raise ValueError(f"{line!r} is not `t{number} = opcode operands`")
        instructions.append(Instruction(opcode, tuple(_operand(text) for text in operands)))
    return Body(tuple(instructions))


def _operand(text: str) -> Operand:
    if not _PLACE.fullmatch(text):
        return Literal.parse(text)
    return Argument(int(text[1:])) if text[0] == "a" else Register(int(text[1:]))


class BodyWriter:
    """A body under construction, with common subexpressions shared."""

    def __init__(self) -> None:
        self._instructions: list[Instruction] = []
        self._known: dict[Instruction, Register] = {}

    def __call__(self, opcode: str, *operands: Operand | Number) -> Register:
        """Append one instruction, or find it, and return its register."""
        values = tuple(o if isinstance(o, Operand) else Literal.of(o) for o in operands)
        instruction = Instruction(opcode, values)
        if instruction not in self._known:
            self._known[instruction] = Register(len(self._instructions))
            self._instructions.append(instruction)
        return self._known[instruction]

    def inline(self, body: Body, operands: Sequence[Operand]) -> Operand:
        """Append the instructions of `body` with `operands` in place of its inputs; returns its result."""
        return body.evaluate(operands, Literal.of, lambda _, opcode, values: self(opcode, *values))

    def finish(self, result: Operand) -> Body:
        """The body that ends in `result`; a copy instruction is added unless `result` is already the last value."""
        written = tuple(self._instructions)
        if result != Register(len(written) - 1):
            written += (Instruction("copy", (result,)),)
        return Body(written)

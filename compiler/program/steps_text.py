"""The steps of a program as text: a line each, operands by name, then the facts that are not their defaults."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from ...runtime.format.operands import BufferOperand, Operand, WeightOperand
from ..ops.body import Body
from .program import Program
from .steps.base import Step, operand_fields

Fact: TypeAlias = "Body | msgspec.Struct | str | float | tuple[Fact, ...] | list[Fact] | None"


def steps_text(program: Program) -> str:
    """`b2 = linear(x=b1, w=@weight) {k=256, n=512}` for each step; sections follow after their names."""
    named = {section.begin: section.name for section in program.sections}
    lines: list[str] = []
    for number, step in enumerate(program.steps):
        lines += [f"section {named[number]}:"] if number in named else []
        lines.append(f"  {_line(step)}")
    return "\n".join(lines) + "\n"


def _line(step: Step) -> str:
    written = ", ".join(_place(o) for o in step.outputs.values() if o is not None)
    read = ", ".join(f"{name}={_place(o)}" for name, o in step.inputs.items() if o is not None)
    facts = ", ".join(f"{name}={_fact(value)}" for name, value in _facts(step).items())
    return f"{written + ' = ' if written else ''}{step.op}({read})" + (f" {{{facts}}}" if facts else "")


def _facts(step: Step) -> dict[str, Fact]:
    """The fields that hold no operand and differ from their defaults."""
    left_out = {*operand_fields(type(step)), "kernel"}
    found: dict[str, Fact] = {}
    for field in msgspec.structs.fields(step):
        value = getattr(step, field.name)
        if field.name not in left_out and (field.default is msgspec.NODEFAULT or value != field.default):
            found[field.name] = value
    return found


def _place(operand: Operand) -> str:
    if isinstance(operand, WeightOperand):
        return f"@{operand.name}" + (f"+{operand.offset}" if operand.offset else "")
    offset = operand.offset if isinstance(operand, BufferOperand) else 0
    return operand.name + (f"+{offset}" if offset else "")


def _fact(value: Fact) -> str:
    if isinstance(value, Body):
        return f'"{value}"'
    if isinstance(value, msgspec.Struct):
        stated = {
            field.name: getattr(value, field.name)
            for field in msgspec.structs.fields(value)
            if field.default is msgspec.NODEFAULT or getattr(value, field.name) != field.default
        }
        return "{" + ", ".join(f"{name}={_fact(part)}" for name, part in stated.items()) + "}"
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(map(_fact, value)) + "]"
    return str(value)

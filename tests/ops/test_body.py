"""Bodies of elementwise kernels: text and value convert to each other, and a composition computes what its two parts
compute."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from icc.compiler.ops.body import Argument, Body, BodyWriter, Instruction, Literal, Number, Operand, Register
from icc.compiler.ops.pointwise import pointwise

NUMBERS = st.one_of(st.booleans(), st.integers(), st.floats())
INPUTS = 3
OPERATIONS: dict[str, Callable[..., float]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "maximum": lambda a, b: a if a >= b else b,
    "copy": lambda a: a,
}


@st.composite
def bodies(draw: st.DrawFn) -> Body:
    """Any body of two-operand instructions over `INPUTS` inputs."""
    instructions: list[Instruction] = []
    for number in range(draw(st.integers(1, 8))):
        operands: list[st.SearchStrategy[Operand]] = [
            st.builds(Argument, st.integers(0, INPUTS - 1)),
            st.builds(Literal.of, NUMBERS),
        ]
        if number:
            operands.append(st.builds(Register, st.integers(0, number - 1)))
        instructions.append(
            Instruction(
                draw(st.sampled_from(["add", "sub", "mul", "maximum"])), tuple(draw(st.one_of(operands)) for _ in "ab")
            )
        )
    return Body(tuple(instructions))


def run(body: Body, arguments: list[float]) -> float:
    """Evaluate a body in Python's floats; results are compared only with each other."""

    def apply(_: str, opcode: str, values: list[float]) -> float:
        return OPERATIONS[opcode](*values)

    return body.evaluate(arguments, _clipped, apply)


def _clipped(value: Number) -> float:
    return math.copysign(min(abs(value), 1e30), value)


@given(bodies())
def test_text_and_value_are_the_same(body: Body) -> None:
    assert Body.parse(str(body)) == body
    assert str(Body.parse(str(body))) == str(body)


@given(NUMBERS)
def test_numbers_read_back_exactly(value: Number) -> None:
    found = Literal.parse(str(Literal.of(value))).value
    assert type(found) is type(value) and repr(found) == repr(value)


def test_numbers_that_python_calls_equal_are_different_literals() -> None:
    assert len({Literal.of(v) for v in (1, 1.0, True, 0.0, -0.0)}) == 5
    assert Literal.of(math.nan) == Literal.of(-math.nan)
    write = BodyWriter()
    write("mul", write("add", Argument(0), 1), write("add", Argument(0), 1.0))
    assert str(write.finish(Register(2))) == "t0 = add a0 1; t1 = add a0 1.0; t2 = mul t0 t1"


@given(bodies(), bodies(), st.lists(st.floats(-3, 3), min_size=INPUTS, max_size=INPUTS))
def test_one_body_within_another(inner: Body, outer: Body, arguments: list[float]) -> None:
    write = BodyWriter()
    first = write.inline(inner, [Argument(i) for i in range(INPUTS)])
    both = write.finish(write.inline(outer, [first, Argument(0), Literal.of(2.5)]))
    expected = run(outer, [run(inner, arguments), arguments[0], 2.5])
    assert repr(run(both, arguments)) == repr(expected)
    assert len(both.instructions) <= len(inner.instructions) + len(outer.instructions) + 1


@given(bodies())
def test_a_body_written_again_has_no_instruction_twice(body: Body) -> None:
    write = BodyWriter()
    arguments = [Argument(i) for i in range(INPUTS)]
    assert write.inline(body, arguments) == write.inline(body, arguments)
    found = write.finish(Register(0)).instructions
    assert len(set(found[:-1])) == len(found) - 1 or len(found) == 1


def test_a_result_that_is_not_the_last_value_is_copied() -> None:
    write = BodyWriter()
    first = write("exp", Argument(0))
    write("neg", first)
    assert str(write.finish(first)) == "t0 = exp a0; t1 = neg t0; t2 = copy t0"
    assert str(BodyWriter().finish(Argument(1))) == "t0 = copy a1"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not `t0 = opcode operands`"),
        ("t0 = ", "is not `t0 = opcode operands`"),
        ("t1 = neg a0", "is not `t0 = opcode operands`"),
        ("t0 = neg a0; t0 = neg a0", "is not `t1 = opcode operands`"),
        ("t0 = neg b0", "'b0' is neither an operand nor a number"),
        ("t0 = neg a01", "'a01' is neither an operand nor a number"),
        ("t0 = neg t0", "t0 has no value yet"),
        ("t0 = neg a0; t1 = add t0 t2", "t2 has no value yet"),
    ],
)
def test_what_is_no_body_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Body.parse(text)


def test_an_input_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="reads a1 of 1 inputs"):
        pointwise.reference([torch.zeros(2)], "t0 = add a0 a1")

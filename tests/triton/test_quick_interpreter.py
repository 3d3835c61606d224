"""The quick interpreter leaves out only bookkeeping of Triton's: checks, types and messages are kept."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import triton.runtime.interpreter as interpreter
from icc.compiler.backends.triton.interpreter import load_source
from triton.runtime.errors import InterpreterError

SOURCE = """
import triton
import triton.language as tl


@triton.jit
def work(pointer, value):
    rows = tl.arange(0, 4)
    {line}
"""


@pytest.fixture(autouse=True)
def checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns overflow checks on, even if kernels of whole plans have turned them off."""
    builder = interpreter.interpreter_builder
    monkeypatch.setattr(builder, "options", replace(builder.options, sanitize_overflow=True))


def run(line: str, value: int = 2**30) -> list[int]:
    """The four numbers that a kernel with this line stores."""
    stored = torch.zeros(4, dtype=torch.int64)
    load_source(SOURCE.format(line=line)).work[(1,)](stored, value)
    return stored.tolist()


@pytest.mark.parametrize("sum", ["rows + value * 2", "rows - value - value - 2", "(rows + 1) * value", "value + value"])
def test_integers_that_overflow_are_refused(sum: str) -> None:
    with pytest.raises(InterpreterError, match=r"int32 overflow detected for operation (add|sub|mul)"):
        run(f"tl.store(pointer + rows, {sum})")


def test_the_ends_of_the_range_are_none() -> None:
    assert run("tl.store(pointer + rows, rows + value)", 2**31 - 4) == [2**31 - 4 + i for i in range(4)]
    assert run("tl.store(pointer + rows, 0 - value - rows)", 2**31 - 3) == [3 - 2**31 - i for i in range(4)]


def test_sums_of_64_bits_are_not_checked() -> None:
    assert run("tl.store(pointer + rows, rows.to(tl.int64) + value.to(tl.int64) * 4)") == [2**32 + i for i in range(4)]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("tl.zeros((3,), tl.int32)", "must be a power of 2"),
        ("rows[:, None] + tl.zeros((8, 2), tl.int32)", "incompatible dimensions"),
        ("tl.reshape(rows, (2, 4))", "number of elements"),
        ("tl.store(pointer + 1.5, rows)", "invalid operands|Incompatible|incompatible"),
    ],
)
def test_mistakes_are_refused_again_and_again(line: str, said: str) -> None:
    """Also once their shapes and types are cached."""
    for _ in range(2):
        with pytest.raises(InterpreterError, match=said):
            run(line)


@pytest.mark.parametrize(
    ("line", "kept"),
    [
        ("tl.store(pointer + rows, rows[:, None].shape[0] + rows[None, :].numel)", [8] * 4),
        ("tl.store(pointer + rows, tl.sum(rows[:, None] + rows[None, :], 1))", [6, 10, 14, 18]),
        ("tl.store(pointer + rows, (rows.to(tl.float32) * 0.5 + rows.to(tl.int8)).to(tl.int32))", [0, 1, 3, 4]),
        ("tl.store(pointer + rows, tl.where(rows > 1, rows.to(tl.uint8) + 1, 9))", [9, 9, 3, 4]),
    ],
)
def test_shapes_and_types_are_those_of_triton(line: str, kept: list[int]) -> None:
    assert run(line) == run(line) == kept

"""The PTX machine finds operands of matrix units that reach past a kernel's shared memory (Triton #10573, #10629)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ptx_machine import SHARED_AT, Fault
from ptx_matrix import _operand as operand

MODES = {16: 0, 128: 1, 64: 2, 32: 3}  # codes of swizzle widths in descriptors


def machine(width: int, shared_bytes: int, start: int = SHARED_AT) -> Any:
    """A warp group whose descriptor has rows of `width` bytes, in groups of eight consecutive rows."""
    words = start >> 4 | 8 * width >> 4 << 16 | 8 * width >> 4 << 32 | MODES[width] << 62
    shared = np.zeros((1, SHARED_AT + shared_bytes), np.uint8)
    lanes = SimpleNamespace(threads=128, mask=np.ones(128, bool), shared=shared)
    lanes.get = lambda name, kind: np.full(128, words, np.uint64)
    return lanes


def read(found: Any, columns: int) -> np.ndarray:
    """The right operand of a product of 16 bf16 values of K."""
    rows = np.broadcast_to(np.arange(columns), (4, columns))
    return operand(found, "%desc", rows, 16, "bf16", transposed=False)


@pytest.mark.parametrize("width", [16, 32, 64, 128])
@pytest.mark.parametrize("columns", [8, 16, 24])
def test_an_operand_that_ends_behind_shared_memory_is_a_fault(width: int, columns: int) -> None:
    """A kernel with enough shared memory is right; with one byte or eight rows less it reads beyond it, whether or not
    the values are used."""
    needed = columns * width + (8 * width if width == 16 else 0)  # the halves of K are separate
    assert read(machine(width, needed), columns).shape == (4, columns, 16)
    for wrong in (machine(width, needed - 1), machine(width, needed - 8 * width)):
        with pytest.raises(Fault, match="operand of matrix units"):
            read(wrong, columns)


def test_an_operand_that_begins_before_shared_memory_is_a_fault() -> None:
    assert read(machine(128, 4096, SHARED_AT), 8).shape == (4, 8, 16)
    with pytest.raises(Fault, match="operand of matrix units at 992 to"):
        read(machine(128, 4096, SHARED_AT - 128), 8)

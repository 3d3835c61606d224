"""Operands of matrix units in Triton's IR that Triton 3.6 and 3.7 multiply wrongly.

A thread holds `kWidth` consecutive values of K, of which `mma.sync` reads a part at a time: 4 threads of a row hold 4
kWidth values. If a product's K is smaller, values of different K of the two operands are multiplied (found on an H200
and by tests/triton/ptx_machine.py: 16 values of K with a kWidth of 8).
"""

from __future__ import annotations

import re

from ...errors import KernelRefused

_LAYOUT = re.compile(r"(#mma\d*) = #ttg\.nvidia_mma<\{versionMajor = 2\b")
_OPERAND = re.compile(
    r"tensor<(?:\d+x)*?(\d+)x(\d+)x[a-z]\w*, #ttg\.dot_op<\{opIdx = ([01]), parent = (#mma\d*), kWidth = (\d+)\}>>"
)


def narrow_operands(ir: str) -> tuple[tuple[int, int], ...]:
    """(K, kWidth) of the operands of `mma.sync` for which 4 threads hold more than K values."""
    layouts = set(_LAYOUT.findall(ir))
    products = (line for line in ir.splitlines() if " tt.dot " in line)
    found = {
        (int(columns if side == "0" else rows), int(width))
        for line in products
        for rows, columns, side, layout, width in _OPERAND.findall(line)
        if layout in layouts
    }
    return tuple(sorted((k, width) for k, width in found if k < 4 * width))


def check_operands(ir: str) -> None:
    """Raise KernelRefused for a product in which Triton would multiply values of different K."""
    for k, width in narrow_operands(ir):
        raise KernelRefused(
            f"Triton multiplies {k} values of K in operands of {4 * width} wrongly",
            "this is a gap in icc; please report it",
        )

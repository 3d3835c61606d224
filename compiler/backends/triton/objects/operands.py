"""Operands of matrix units in Triton's IR: those that Triton 3.6 and 3.7 are seen to multiply wrongly.

A thread holds `kWidth` values of K that lie in a row, of which `mma.sync` takes a part at a time: 4 threads of a row
hold 4 kWidth values. Where K of a product is less, the values of the two operands that meet are not of the same K
(found on an H200 and by tests/triton/ptx_machine.py: 16 values of K with a kWidth of 8).
"""

from __future__ import annotations

import re

from ...errors import KernelRefused

_LAYOUT = re.compile(r"(#mma\d*) = #ttg\.nvidia_mma<\{versionMajor = 2\b")
_OPERAND = re.compile(
    r"tensor<(?:\d+x)*?(\d+)x(\d+)x[a-z]\w*, #ttg\.dot_op<\{opIdx = ([01]), parent = (#mma\d*), kWidth = (\d+)\}>>"
)


def narrow_operands(ir: str) -> tuple[tuple[int, int], ...]:
    """(K, kWidth) of the operands of `mma.sync` of which 4 threads hold more values of K than there are."""
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
    """KernelRefused for a product of which Triton would multiply values that do not belong together."""
    for k, width in narrow_operands(ir):
        raise KernelRefused(
            f"Triton multiplies {k} values of K in operands of {4 * width} wrongly",
            "this is a gap in icc; please report it",
        )

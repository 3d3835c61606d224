"""Executes the inline PTX of rendered sources: the few instructions that they use, as the PTX ISA defines them.

Triton's interpreter takes another branch there, so these lines would not be executed without a GPU.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np

Register = np.ndarray  # uint32, one element per thread


def blocks(source: str) -> list[str]:
    """The blocks of inline PTX in a source."""
    return re.findall(r'inline_asm_elementwise\(\s*"""(.*?)"""', source, re.DOTALL)


def execute(text: str, outputs: int, inputs: Sequence[Register]) -> list[Register]:
    """Run a block whose operands $0 .. are the outputs, followed by the inputs; returns the outputs."""
    registers = {f"${outputs + i}": value.astype(np.uint32) for i, value in enumerate(inputs)}
    for line in text.strip().strip("{}").split(";"):
        words = line.split(None, 1)
        if not words or words[0] == ".reg":
            continue
        target, *given = (part.strip() for part in words[1].split(","))
        values = [registers[name] if name in registers else np.uint32(int(name, 0)) for name in given]
        registers[target] = np.asarray(_INSTRUCTIONS[words[0]](*values)).astype(np.uint32)
    return [registers[f"${i}"] for i in range(outputs)]


def _shr(value: Register, count: Register) -> Register:
    return value >> count


def _lop3(a: Register, b: Register, c: Register, table: Register) -> Register:
    """Each bit is the table's entry at the index (a, b, c) of bits."""
    result = np.zeros(np.broadcast_shapes(np.shape(a), np.shape(b), np.shape(c)), np.uint32)
    for entry in range(8):
        if int(table) >> entry & 1:
            result |= (a if entry & 4 else ~a) & (b if entry & 2 else ~b) & (c if entry & 1 else ~c)
    return result


def _prmt(a: Register, b: Register, selector: Register) -> Register:
    """Four of the eight bytes of b and a, each chosen by a nibble, or its sign if the nibble's highest bit is set."""
    result = np.zeros(np.broadcast_shapes(np.shape(a), np.shape(b), np.shape(selector)), np.uint32)
    for place in range(4):
        choice = selector >> np.uint32(4 * place) & np.uint32(15)
        byte = (np.where(choice & 4, b, a) >> 8 * (choice & 3)) & np.uint32(255)
        byte = np.where(choice & 8, np.where(byte & 128, 255, 0), byte).astype(np.uint32)
        result |= byte << np.uint32(8 * place)
    return result


def _fma_bf16x2(a: Register, b: Register, c: Register) -> Register:
    """Two times a * b + c, each rounded once, to nearest even."""
    halves = []
    for shift in (0, 16):
        x, y, z = (bf16(v >> np.uint32(shift)).astype(np.float64) for v in (a, b, c))
        halves.append(to_bf16(x * y + z))
    return halves[0] | halves[1] << np.uint32(16)


def bf16(bits: Register) -> np.ndarray:
    """The bf16 numbers in the lower halves, as float32."""
    return ((np.asarray(bits).astype(np.uint32) & np.uint32(0xFFFF)) << np.uint32(16)).view(np.float32)


def to_bf16(value: np.ndarray) -> Register:
    """The nearest bf16 of float64 numbers that float32 holds exactly, in the lower halves."""
    wide = np.asarray(value).astype(np.float32)
    assert np.array_equal(wide.astype(np.float64), value, equal_nan=True)
    bits = wide.view(np.uint32)
    return (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)


_INSTRUCTIONS: dict[str, Callable[..., Register]] = {
    "mov.b32": lambda value: value,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "shr.u32": _shr,
    "lop3.b32": _lop3,
    "prmt.b32": _prmt,
    "fma.rn.bf16x2": _fma_bf16x2,
}

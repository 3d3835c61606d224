"""The element types of generated C++: bytes and names."""

from __future__ import annotations

PLAIN = {"f32": 4, "bf16": 2, "f16": 2, "i32": 4}
C_TYPES = {"f32": "float", "bf16": "Bf16", "f16": "Half", "i32": "int32_t", "bool": "int32_t", "i8": "int8_t"}


def round_up(value: int, unit: int) -> int:
    """The smallest multiple of `unit` that is at least `value`."""
    return (value + unit - 1) // unit * unit

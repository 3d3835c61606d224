"""The element types that buffers, weights and inputs can hold."""

from __future__ import annotations

import struct

# bytes per element
ITEM_SIZE = {"f32": 4, "bf16": 2, "f16": 2, "i32": 4, "i8": 1, "u8": 1}
# struct formats of one element; bf16 is the upper half of a float32
_PACKED = {"f32": "<f", "f16": "<e", "i32": "<i", "i8": "<b", "u8": "<B"}


def element_bytes(value: float, dtype: str) -> bytes:
    """The bytes of one element in memory. bf16 is truncated, not rounded. struct.error for a value that the type cannot
    hold."""
    if dtype == "bf16":
        return struct.pack("<f", value)[2:]
    return struct.pack(_PACKED[dtype], value if dtype.startswith("f") else int(value))

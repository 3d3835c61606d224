"""How the numbers of a KV cache are stored: the part of a KV format that the runtime needs."""

from __future__ import annotations

import msgspec


class KVNumbers(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The sizes of one KV format.

    name: as in KVGroup.dtype. bits: per element; elements of fewer than 8 bits are packed. scaled: each key and each
    value of a token and head has four more bytes: a float32 scale, or if elements are packed a float16 scale and a
    float16 centre.
    """

    name: str
    bits: int
    scaled: bool = False

    @property
    def per_byte(self) -> int:
        """How many elements share a byte; 0 if they are not packed."""
        return 8 // self.bits if self.bits < 8 else 0

    @property
    def item_size(self) -> int:
        """The size in bytes of the smallest addressable unit: an element, or a byte of packed elements."""
        return max(self.bits // 8, 1)

    def problem(self) -> str:
        """Why a cache cannot have these sizes; "" if it can."""
        packs = 0 < self.bits < 8 and 8 % self.bits == 0
        return (
            "" if packs or self.bits in (8, 16, 32) else f"elements of {self.bits} bits, and not 1, 2, 4, 8, 16 or 32"
        )

    def vector_bytes(self, dim: int, align: int = 1) -> int:
        """How many bytes one key or value of `dim` elements takes; for unpacked elements a multiple of `align`."""
        nbytes = (dim * self.bits + 7) // 8
        return nbytes if self.per_byte else -(-nbytes // align) * align


_KNOWN = (
    KVNumbers("f32", 32), KVNumbers("f16", 16), KVNumbers("bf16", 16), KVNumbers("i8", 8, scaled=True),
    KVNumbers("f8", 8, scaled=True), KVNumbers("i4", 4, scaled=True), KVNumbers("i2", 2, scaled=True),
)  # fmt: skip
KV_NUMBERS = {numbers.name: numbers for numbers in _KNOWN}
"""The formats that an engine may name without describing them; it describes others, see KVGroup.stored."""

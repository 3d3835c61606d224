"""How the numbers of a KV cache lie in memory: what the runtime must know of a KV format."""

from __future__ import annotations

import msgspec


class KVNumbers(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The sizes of one KV format.

    name: as KVGroup.dtype has it. bits: of one element; elements of fewer than 8 are packed. scaled: each key and each
    value of a token and head has four bytes beside it: a float32 scale, or where elements are packed a scale and a
    centre of float16.
    """

    name: str
    bits: int
    scaled: bool = False

    @property
    def per_byte(self) -> int:
        """Elements that share a byte; 0 where they are not packed."""
        return 8 // self.bits if self.bits < 8 else 0

    @property
    def item_size(self) -> int:
        """Bytes of the smallest addressable unit: an element, or a byte of packed elements."""
        return max(self.bits // 8, 1)

    def problem(self) -> str:
        """Why there can be no such cache; "" if there can."""
        packs = 0 < self.bits < 8 and 8 % self.bits == 0
        return (
            "" if packs or self.bits in (8, 16, 32) else f"elements of {self.bits} bits, and not 1, 2, 4, 8, 16 or 32"
        )

    def vector_bytes(self, dim: int, align: int = 1) -> int:
        """Bytes from one key or value of `dim` elements to the next; of unpacked ones a multiple of `align`."""
        nbytes = (dim * self.bits + 7) // 8
        return nbytes if self.per_byte else -(-nbytes // align) * align


_KNOWN = (
    KVNumbers("f32", 32), KVNumbers("f16", 16), KVNumbers("bf16", 16), KVNumbers("i8", 8, scaled=True),
    KVNumbers("f8", 8, scaled=True), KVNumbers("i4", 4, scaled=True), KVNumbers("i2", 2, scaled=True),
)  # fmt: skip
KV_NUMBERS = {numbers.name: numbers for numbers in _KNOWN}
"""Those that an engine may name without saying what they are. An engine says it of others: see KVGroup.stored."""

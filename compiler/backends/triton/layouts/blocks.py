"""Blocks of files (weights/formats/blocks.py), each part in a section of its own, row by row.

Codes are in fields of 2, 4 or 8 bits; the scales and other values of blocks and groups are unchanged, their rows padded
to words of 4 bytes. Sections are padded to 64 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ....program.layout import Arrays
from ....targets import SCALED_LEVEL
from ....weights.formats.base import Array
from ....weights.formats.blocks import BlockFormat
from ....weights.formats.tables import E2M1
from ...cpu.layouts.elements import round_up
from ...cpu.layouts.scales import SCALE_TYPES, scale_values, stored_scales
from .codes import WIDE_SLICE, CodeGroups, Rows8, Unpacking

ALIGN = 64
_FIELDS = {2: 2, 3: 4, 4: 4}  # bits of a code in memory; 8 for other codes


@dataclass(frozen=True)
class Beside:
    """A value that blocks or groups have beside their codes, read in words of 4 bytes, as asynchronous copies need.

    begin: start of its section. item: bytes of a value, one per `unit` values of K. words: words that a step of a row
    reads; whole: whether no other step needs them. by_group: whether each group of a step reads the word with its item,
    because blocks do not end where steps do. row_words: words from one row to the next.
    """

    name: str
    begin: int
    item: int
    unit: int
    words: int
    row_words: int
    whole: bool = False
    by_group: bool = False

    @property
    def per_word(self) -> int:
        """Values of K that one word covers."""
        return self.unit * 4 // self.item

    @property
    def turns(self) -> int:
        """Items in a word, if a step or a group of it uses only one of them; 1 if a step uses all."""
        return 1 if self.whole else 4 // self.item


@dataclass(frozen=True)
class BlockRows(CodeGroups):
    """Codes of K values of a row, then of the next row."""

    format: BlockFormat  # type: ignore[reportIncompatibleVariableOverride]  # frozen, so narrower is right

    @classmethod
    def of(cls, form: BlockFormat) -> BlockRows:
        """The row layout of a format, under the format's name."""
        return cls(f"g{form.name}", form)

    @property
    def macros(self) -> str:
        return "triton/layouts/blocks.py.jinja"

    @property
    def bits(self) -> int:
        """Bits that a code takes in memory."""
        return _FIELDS.get(self.format.bits, 8)

    @property
    def groups_each(self) -> int:
        """Groups that one dot of a step multiplies. For codes of less than a byte Triton makes operands 32 values wide
        and multiplies narrower ones wrongly (objects/operands.py)."""
        return 2 if self.bits < 8 and self.group < 32 else 1

    @property
    def unpacking(self) -> Unpacking:
        beside = 8 * self.format.nbytes((1, self.format.size)) - self.format.bits * self.format.size
        scale_bytes = max(1, round(beside / 8 * self.group / self.format.size))
        few = self.group & (self.group - 1) == 0 and self.group <= WIDE_SLICE
        chosen = bool(self.format.table) and not self.halves  # in a table, by the bits of a code
        cost = 6.0 + 3.0 * (self.format.group_scales != "none") + 2.0 * (self.group < 32) + 6.0 * chosen
        return Unpacking(
            self.name, self.group, self.bits, scale_bytes, 2.0 + 5.0 * chosen, cost, 64 * chosen, few=few
        )  # fmt: skip

    @property
    def halves(self) -> bool:
        """Whether codes are floats of 4 bits, doubled, which arithmetic decodes faster than a table."""
        return tuple(self.format.table or ()) == E2M1

    @property
    def looked_up(self) -> bool:
        """Whether codes are 4-bit indices into a table that instructions which permute bytes look up."""
        return self.bits == 4 and bool(self.format.table) and not self.halves

    @property
    def level_words(self) -> tuple[tuple[str, ...], ...]:
        """The sixteen levels of a table as float32, byte by byte from the lowest: four words in hexadecimal each."""
        table = self.format.table or (0.0,)
        levels = np.array([table[min(code, len(table) - 1)] for code in range(16)], np.float32)
        planes = levels.view(np.uint8).reshape(16, 4).T
        return tuple(tuple(f"0x{word:08x}" for word in np.ascontiguousarray(plane).view("<u4")) for plane in planes)

    @property
    def group(self) -> int:
        return self.format.group

    def rows8(self, level: int) -> Rows8:
        """As `CodeGroups.rows8`: tensor cores of sm_100 read floats of 4 bits with a power of two per 32 of them in
        this layout."""
        return "mxfp8" if self.format.micro_rows and level // 10 == SCALED_LEVEL // 10 else ""

    def by_turns(self, beside: Beside, level: int) -> bool:
        """Whether each item of a word that several steps share is loaded by itself, with the others as 0, instead of
        shifted by an amount known only at run time: after such a shift Triton does not make operands in the registers
        in which they are multiplied. Levels of a table cost less through shared memory, as warps then look none up
        twice; on sm_90 only if they are not looked up by permuting bytes."""
        cheap = level // 10 == 9 and self.looked_up if self.format.table else level // 10 in (8, 9, 12)
        return beside.turns > 1 and cheap

    def misfit(self, n: int, k: int) -> str:
        if k % self.format.size:
            return f"K = {k} is not a multiple of {self.format.size}"
        return super().misfit(n, k)

    def sections(self, n: int, k: int) -> dict[str, tuple[int, int]]:
        """Begin and end of each part, in bytes."""
        found: dict[str, tuple[int, int]] = {}
        start = 0
        for name, array in self.format.arrays((n, k)).items():
            row = k * self.bits // 8 if name == "codes" else self._pitch_of(array, k) * array.dtype.itemsize
            size = n * row
            found[name] = start, start + size
            start = round_up(start + size, ALIGN)
        return found

    def pitch(self, unit: int, k: int) -> int:
        """Blocks of `unit` values, or groups, from one row of K to the next, padded so that rows begin at whole
        words."""
        beside = [array for name, array in self.format.arrays((1, k)).items() if name != "codes"]
        items = [array.dtype.itemsize for array in beside if array.shape[-1] == k // unit]
        return round_up(k // unit, max(4 // min(items, default=4), 1))

    def _pitch_of(self, array: Array, k: int) -> int:
        return self.pitch(k // array.shape[-1], k)

    def at(self, part: str, n: int, k: int) -> int:
        """The offset of a part, in bytes."""
        return self.sections(n, k)[part][0]

    def matrix_nbytes(self, n: int, k: int) -> int:
        return round_up(max(end for _, end in self.sections(n, k).values()), ALIGN)

    def pack_matrix(self, parts: Arrays) -> np.ndarray:
        n, k = parts["codes"].shape
        if reason := self.misfit(n, k):
            raise ValueError(reason)
        packed = np.zeros(self.matrix_nbytes(n, k), np.uint8)
        for name, (start, end) in self.sections(n, k).items():
            stored = self._fields(parts["codes"]) if name == "codes" else parts[name]
            if name in ("scales", "mins"):
                stored = stored_scales(stored, self.format.scale if name == "scales" else "f16")
            rows = np.ascontiguousarray(stored).reshape(n, -1).view(np.uint8)
            packed[start:end].reshape(n, -1)[:, : rows.shape[1]] = rows
        return packed

    def unpack_matrix(self, packed: np.ndarray, n: int, k: int) -> dict[str, np.ndarray]:
        found: dict[str, np.ndarray] = {}
        for name, array in self.format.arrays((n, k)).items():
            start, end = self.sections(n, k)[name]
            raw = packed[start:end].reshape(n, -1)
            if name == "codes":
                fields = raw[:, :, None] >> np.arange(0, 8, self.bits, dtype=np.uint8)
                found[name] = (fields & np.uint8(2**self.bits - 1)).reshape(n, k)
            elif name in ("scales", "mins"):
                kind = SCALE_TYPES[self.format.scale if name == "scales" else "f16"]
                found[name] = scale_values(raw.view(kind)[:, : array.shape[-1]])
            else:
                kind = np.int8 if self.format.group_scales == "i8" and name == "group_scales" else np.uint8
                found[name] = raw.view(kind)[:, : array.shape[-1]]
        return found

    def beside(self, n: int, k: int, step: int) -> tuple[Beside, ...]:
        """The values that a matrix has beside its codes, for steps of `step` values of K."""
        found = []
        for name, array in self.format.arrays((n, k)).items():
            if name == "codes":
                continue
            item, unit = array.dtype.itemsize, k // array.shape[-1]
            per = unit * 4 // item
            whole, by_group = step % per == 0, bool(step % per and per % step)
            words = step // per if whole else step // self.group if by_group else 1
            row_words = item * self._pitch_of(array, k) // 4
            found.append(Beside(name, self.at(name, n, k), item, unit, words, row_words, whole, by_group))
        return tuple(found)

    @property
    def as_values(self) -> bool:
        """As `CodeGroups.as_values`: true if steps consist of whole groups."""
        return self.unpacking.few

    def _fields(self, codes: np.ndarray) -> np.ndarray:
        """Codes packed into bytes, from the low bits up."""
        each = 8 // self.bits
        shifts = np.arange(each, dtype=np.uint8) * np.uint8(self.bits)
        return np.bitwise_or.reduce(codes.reshape(-1, each) << shifts, axis=1)

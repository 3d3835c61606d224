"""Blocks of files (weights/formats/blocks.py) in tiles of 16 rows, for products with int8 activations.

A tile is a sequence of spans of `span` steps of 16 k, or 32 where the format's `row_group` is: one header, then the
lines of each step. The header holds what blocks and groups have besides codes, 16 rows next to each other: scales (or
e8m0 exponents), minima and zeros of every block in the span, then the integer scales and minima of every group. Codes
of more than 4 bits, and those of 3, are split: the lines hold the lower 4 (or 2) bits, and a line before them the upper
bits of as many steps as fill it, fields of one byte following the quads of k. Codes of 2 bits: a line holds 16 rows x
16 k, quad after quad from the low bits up. A weight thus takes as many bytes as in the file, except that integer scales
of 6 bits are bytes here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ....program.layout import Arrays
from ....weights.formats.blocks import BlockFormat
from .block_reader import BlockReader, reader_of
from .codes import CodeTiles
from .elements import round_up
from .scales import SCALE_TYPES, scale_values, stored_scales
from .tiles import TILE, byte_lines, nibble_lines, of_byte_lines, of_nibble_lines, tiled


@dataclass(frozen=True)
class BlockTiles(CodeTiles):
    """Consecutive tiles, each of a multiple of 64 bytes."""

    format: BlockFormat  # type: ignore[reportIncompatibleVariableOverride]  # frozen, so narrower is right

    @classmethod
    def of(cls, form: BlockFormat) -> BlockTiles:
        """The layout of a format, under the format's name."""
        return cls(form.name, form)

    @property
    def label(self) -> str:
        return self.format.name

    @property
    def reader(self) -> BlockReader:
        return reader_of(self.format)

    def misfit(self, n: int, k: int) -> str:
        return "" if k % self.format.size == 0 else f"K = {k} is not a multiple of {self.format.size}"

    def tile_bytes(self, k: int) -> int:
        read = self.reader
        steps = k // read.step
        return round_up(-(-steps // read.span) * read.header_bytes + steps * read.step_bytes, 64)

    def pack_matrix(self, parts: Arrays) -> np.ndarray:
        read, (n, k) = self.reader, parts["codes"].shape
        if reason := self.misfit(n, k):
            raise ValueError(reason)
        steps = k // read.step
        spans = -(-steps // read.span)
        codes = tiled(parts["codes"]).reshape(-1, TILE, steps, read.step)
        tiles = len(codes)
        body = np.zeros((tiles, spans * read.span, read.step_bytes), np.uint8)
        body[:, :steps] = self._lines(codes)
        head = np.concatenate([self._fields(name, value, spans) for name, value in self._beside(parts).items()], axis=2)
        whole = np.concatenate([head, body.reshape(tiles, spans, -1)], axis=2).reshape(tiles, -1)
        packed = np.zeros((tiles, self.tile_bytes(k)), np.uint8)
        width = min(whole.shape[1], packed.shape[1])
        packed[:, :width] = whole[:, :width]
        return packed.reshape(-1)

    def unpack_matrix(self, packed: np.ndarray, n: int, k: int) -> dict[str, np.ndarray]:
        read = self.reader
        steps = k // read.step
        spans, tiles = -(-steps // read.span), round_up(n, TILE) // TILE
        size = read.header_bytes + read.span * read.step_bytes
        whole = np.zeros((tiles, spans * size), np.uint8)
        given = packed.reshape(tiles, -1)[:, : spans * size]
        whole[:, : given.shape[1]] = given
        whole = whole.reshape(tiles, spans, size)
        body = whole[:, :, read.header_bytes :].reshape(tiles, spans * read.span, -1)[:, :steps]
        codes = self._of_lines(np.ascontiguousarray(body))
        found = {"codes": codes.reshape(-1, k)[:n]}
        return found | self._of_header(np.ascontiguousarray(whole[:, :, : read.header_bytes]), n, k)

    # codes

    def _lines(self, codes: np.ndarray) -> np.ndarray:
        """Pack codes into lines: [tiles, 16, steps, values of a step] -> [tiles, steps, bytes of a step]."""
        read = self.reader
        low = codes & np.uint8(2**read.base - 1)
        lines = {2: _crumb_lines, 4: nibble_lines, 8: byte_lines}[read.base](low)
        if not read.fine:
            return lines
        tiles, _, steps, _ = codes.shape
        quads = (codes >> np.uint8(read.base)).reshape(tiles, TILE, steps // read.fine_steps, -1, 4)
        shifts = (np.arange(quads.shape[3], dtype=np.uint8) * np.uint8(read.fine))[:, None]
        fine = np.bitwise_or.reduce(quads << shifts, axis=3)  # [tiles, 16, lines, 4]
        fine = fine.transpose(0, 2, 1, 3).reshape(tiles, -1, 64)
        both = np.concatenate([fine, lines.reshape(*fine.shape[:2], -1)], axis=2)
        return both.reshape(tiles, steps, -1)

    def _of_lines(self, body: np.ndarray) -> np.ndarray:
        """Inverse of `_lines`: [tiles, 16, steps, values of a step]."""
        read = self.reader
        tiles, steps = body.shape[:2]
        if not read.fine:
            return _codes_of(body, read.base).reshape(tiles, TILE, steps, read.step)
        both = body.reshape(tiles, steps // read.fine_steps, -1)
        lines = both[:, :, 64:].reshape(tiles, steps, -1)
        low = _codes_of(np.ascontiguousarray(lines), read.base).reshape(tiles, TILE, steps, read.step)
        fine = both[:, :, :64].reshape(tiles, -1, TILE, 4).transpose(0, 2, 1, 3)[:, :, :, None]
        shifts = (np.arange(read.fine_steps * read.step // 4, dtype=np.uint8) * np.uint8(read.fine))[:, None]
        high = (fine >> shifts & np.uint8(2**read.fine - 1)).reshape(tiles, TILE, steps, read.step)
        return low | high << np.uint8(read.base)

    # headers

    def _beside(self, parts: Arrays) -> Arrays:
        """The arrays other than codes, in the order and the types of headers."""
        form = self.format
        found: dict[str, np.ndarray] = {}
        if form.power:
            found["exponents"] = parts["exponents"]
        else:
            found["scales"] = stored_scales(parts["scales"], form.scale)
        if form.mins:
            found["mins"] = parts["mins"].astype(np.float16)
        if form.zeros:
            found["zeros"] = parts["zeros"]
        if form.group_scales == "u4" and form.mins:
            found["group_scales"] = parts["group_scales"] | parts["group_mins"] << np.uint8(4)
        elif form.group_scales != "none":
            found["group_scales"] = parts["group_scales"]
            if form.mins:
                found["group_mins"] = parts["group_mins"]
        return found

    def _fields(self, name: str, value: np.ndarray, spans: int) -> np.ndarray:
        """[N, X] -> [tiles, spans, bytes]: in each span its columns one after the other, 16 rows each."""
        rows = tiled(value)
        tiles, _, width = rows.shape
        each = self.reader.groups if name.startswith("group_") else self.reader.blocks
        padded = np.zeros((tiles, TILE, spans * each), value.dtype)
        padded[:, :, :width] = rows
        columns = padded.reshape(tiles, TILE, spans, each).transpose(0, 2, 3, 1)
        return np.ascontiguousarray(columns).reshape(tiles, spans, -1).view(np.uint8)

    def _of_header(self, head: np.ndarray, n: int, k: int) -> dict[str, np.ndarray]:
        form, read, tiles, spans = self.format, self.reader, *head.shape[:2]

        def columns(at: int, each: int, dtype: type, count: int) -> np.ndarray:
            size = np.dtype(dtype).itemsize
            raw = np.ascontiguousarray(head[:, :, at : at + each * TILE * size]).view(dtype)
            rows = raw.reshape(tiles, spans, each, TILE).transpose(0, 3, 1, 2).reshape(tiles * TILE, -1)
            return np.ascontiguousarray(rows[:n, :count])

        blocks, groups = k // form.size, k // form.group
        found: dict[str, np.ndarray] = {}
        if form.power:
            found["exponents"] = columns(0, read.blocks, np.uint8, blocks)
        else:
            stored = columns(0, read.blocks, SCALE_TYPES[form.scale], blocks)
            found["scales"] = scale_values(stored)
        if form.zeros:
            found["zeros"] = columns(read.mins_at, read.blocks, np.uint8, blocks)
        if form.mins:
            found["mins"] = columns(read.mins_at, read.blocks, np.float16, blocks).astype(np.float32)
        if form.group_scales != "none":
            kind = np.int8 if form.group_scales == "i8" else np.uint8
            own = columns(read.group_scales_at, read.groups, kind, groups)
            if form.group_scales == "u4" and form.mins:
                found |= {"group_scales": own & np.uint8(15), "group_mins": own >> np.uint8(4)}
            else:
                found["group_scales"] = own
                if form.mins:
                    found["group_mins"] = columns(read.group_mins_at, read.groups, kind, groups)
        return found


def _crumb_lines(rows: np.ndarray) -> np.ndarray:
    """Pack values below 4: [tiles, 16, groups, group] -> [tiles, groups, bytes], 16 k in a line, quad by quad."""
    tiles, _, groups, group = rows.shape
    quads = rows.reshape(tiles, TILE, groups, group // 16, 4, 4)
    lines = np.bitwise_or.reduce(quads << np.array([0, 2, 4, 6], np.uint8)[:, None], axis=4)
    return lines.transpose(0, 2, 3, 1, 4).reshape(tiles, groups, -1)


def _codes_of(lines: np.ndarray, bits: int) -> np.ndarray:
    """Codes of lines [tiles, groups, bytes], k in order: [tiles, 16, groups, ...]."""
    if bits == 4:
        return of_nibble_lines(lines)
    rows = of_byte_lines(lines)
    if bits == 8:
        return rows
    return rows[..., None, :] >> np.array([0, 2, 4, 6], np.uint8)[:, None] & np.uint8(3)

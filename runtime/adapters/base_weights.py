"""BaseWeights: values of an engine's weights, unpacked for the adapters that need them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod

import numpy as np

from ..format.adapters import AdapterSite
from ..format.bfloat16 import bf16_values
from ..format.program import WeightEntry

_TILE = 16  # rows of a tile on CPUs
_HEADER = 64  # bytes of scales and zero points before the codes of a group on CPUs
_ROWS = 1024  # rows compared at a time
_ROUNDED = 2.0**-8  # 16-bit values, relative to the largest of a row
_TOLERANCE = {
    "f32": 1e-7, "tile_f32": 1e-7, **dict.fromkeys(("f16", "bf16", "tile_f16", "tile_bf16"), _ROUNDED),
    **dict.fromkeys(("q8", "q8s", "gq8", "gi8", "e4m3", "e4m3w", "ge4m3", "ge4m3w"), 0.05),
}  # fmt: skip
_NUMPY = {"f32": np.float32, "bf16": np.uint16, "f16": np.float16}


View = Callable[[str], np.ndarray]


class BaseWeights:
    """Rows of matrices [n, k] by the weight's name, for layouts of dense values and of integer codes.

    entries: the weights of the program. view: returns the packed bytes of a weight, uint8. others: as `view`, for each
    other rank in order, each of which holds parts; these raise KeyError for a weight of which the rank holds no part.
    """

    def __init__(self, entries: Mapping[str, WeightEntry], view: View, others: Sequence[View] = ()) -> None:
        self._entries, self._view, self._others = entries, view, others

    def format(self, name: str) -> str:
        """How a weight is packed; "" if the program has no such weight."""
        return self._entries[name].format if name in self._entries else ""

    def readable(self, name: str) -> bool:
        """Whether `rows` can read it."""
        return self.format(name) in _READERS and len(self._entries[name].shape) == 2

    def vector(self, name: str) -> np.ndarray:
        """A vector that is stored as float32."""
        return self._view(name).view(np.float32)[: prod(self._entries[name].shape)]

    def rows(self, name: str, first: int, count: int) -> np.ndarray:
        """Rows [first, first + count) as float32 [count, k]."""
        entry = self._entries[name]
        n, k = entry.shape
        return _READERS[entry.format](self._view(name), n, k, first, count)

    def of_site(self, site: AdapterSite, first: int, count: int) -> np.ndarray:
        """Rows [first, first + count) of the weight of a site as float32 [count, k], from the ranks that hold them."""
        n, k = self._entries[site.base].shape
        read = _READERS[self._entries[site.base].format]
        if not site.base_cuts:
            return read(next(self._holders(site.base)), n, k, site.base_row + first, count)
        found = np.empty((count, site.k), np.float32)
        for ranges, packed in zip(site.base_cuts, self._holders(site.base), strict=False):
            rows = read(packed, n, k, site.base_row + first, count) if site.base_axis else None
            at = 0
            for begin, end in ranges:
                if rows is not None:
                    found[:, begin:end] = rows[:, at : at + end - begin]
                elif (low := max(begin, first)) < (high := min(end, first + count)):
                    own = site.base_row + at + low - begin
                    found[low - first : high - first] = read(packed, n, k, own, high - low)
                at += end - begin
        return found

    def _holders(self, name: str) -> Iterator[np.ndarray]:
        """The part of a weight that each rank has, for the ranks that have one."""
        for view in (self._view, *self._others):
            try:
                yield view(name)
            except KeyError:
                continue

    def differing(
        self, site: AdapterSite, values: np.ndarray, rounding: bool, columns: np.ndarray | float
    ) -> np.ndarray | None:
        """The indices of the rows of `values` [n, k] that differ from a site's stored weight, int64.

        rounding: whether 8-bit codes count as equal to any value that rounds to them. columns: factors by which the
        stored columns are multiplied. None if the rows cannot be compared.
        """
        tolerance = _TOLERANCE.get(self.format(site.base)) if self.readable(site.base) else None
        if tolerance is None or (tolerance > _ROUNDED and not rounding) or values.shape[1:] != (site.k,):
            return None
        found: list[int] = []
        for begin in range(0, len(values), _ROWS):
            given = values[begin : begin + _ROWS]
            stored = self.of_site(site, begin, len(given)) / columns
            limit = tolerance * np.abs(given).max(axis=1, keepdims=True)
            found += (begin + np.nonzero((np.abs(given - stored) > limit).any(axis=1))[0]).tolist()
        return np.array(found, np.int64)


Reader = Callable[[np.ndarray, int, int, int, int], np.ndarray]


def _values(stored: np.ndarray) -> np.ndarray:
    return bf16_values(stored) if stored.dtype == np.uint16 else stored.astype(np.float32)


def _dense(kind: str) -> Reader:
    def read(packed: np.ndarray, n: int, k: int, first: int, count: int) -> np.ndarray:
        size = k * np.dtype(_NUMPY[kind]).itemsize
        return _values(packed[first * size : (first + count) * size].view(_NUMPY[kind])).reshape(count, k)

    return read


def _tiles_of(packed: np.ndarray, nbytes: int, first: int, count: int) -> tuple[np.ndarray, slice]:
    """The tiles that rows lie in, uint8 [tiles, nbytes], and which of their rows these are."""
    begin, end = first // _TILE, -(-(first + count) // _TILE)
    at = first - begin * _TILE
    return packed[begin * nbytes : end * nbytes].reshape(end - begin, nbytes), slice(at, at + count)


def _dense_tiles(kind: str) -> Reader:
    """[tile][k][16]."""

    def read(packed: np.ndarray, n: int, k: int, first: int, count: int) -> np.ndarray:
        nbytes = k * _TILE * np.dtype(_NUMPY[kind]).itemsize
        tiles, rows = _tiles_of(packed, nbytes, first, count)
        values = np.ascontiguousarray(tiles).view(_NUMPY[kind]).reshape(-1, k, _TILE)
        return _values(np.ascontiguousarray(values.swapaxes(1, 2).reshape(-1, k)[rows]))

    return read


def _bytes_of(lines: np.ndarray) -> np.ndarray:
    """Lines of a group [tiles, groups, bytes] as [tiles, 16, groups, .., 4]: four bytes of a row lie together."""
    return lines.reshape(*lines.shape[:2], -1, _TILE, 4).transpose(0, 3, 1, 2, 4)


def _nibbles_of(lines: np.ndarray) -> np.ndarray:
    """`_bytes_of` for codes of 4 bits: k 0 to 3 in the low nibbles of four bytes, k 4 to 7 in the high ones."""
    found = _bytes_of(lines)
    return np.stack([found & 15, found >> 4], axis=-2)


def _coded_tiles(bits: int) -> Reader:
    """Per group a header (16 f16 scales, 16 u8 zero points, an f32 that multiplies the scales), then lines of codes."""

    def read(packed: np.ndarray, n: int, k: int, first: int, count: int) -> np.ndarray:
        nbytes = _tile_bytes(packed, n)
        tiles, rows = _tiles_of(packed, nbytes, first, count)
        groups = (nbytes - k * _TILE * bits // 8) // _HEADER
        parts = np.ascontiguousarray(tiles).reshape(len(tiles), groups, -1)
        codes = (_nibbles_of if bits == 4 else _bytes_of)(parts[:, :, _HEADER:])
        return _scaled(codes.reshape(len(tiles) * _TILE, groups, -1)[rows], *_headers(parts, rows))

    return read


def _split_tiles(packed: np.ndarray, n: int, k: int, first: int, count: int) -> np.ndarray:
    """High nibbles with headers, as codes of 4 bits have them; behind all tiles the low ones."""
    low_bytes = k * _TILE // 2
    nbytes = _tile_bytes(packed, n) - low_bytes
    tiles, rows = _tiles_of(packed, nbytes, first, count)
    lows, _ = _tiles_of(packed[-(-n // _TILE) * nbytes :], low_bytes, first, count)
    groups = (nbytes - low_bytes) // _HEADER
    parts = np.ascontiguousarray(tiles).reshape(len(tiles), groups, -1)
    low = np.ascontiguousarray(lows).reshape(len(tiles), groups, -1)
    codes = _nibbles_of(parts[:, :, _HEADER:]) << 4 | _nibbles_of(low)
    return _scaled(codes.reshape(len(tiles) * _TILE, groups, -1)[rows], *_headers(parts, rows))


def _e4m3_values() -> np.ndarray:
    """The values of the 256 e4m3 codes, float32 [256]; NaNs are zeros, for no weight holds a NaN."""
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    normal = np.ldexp(1 + mantissa / 8, exponent - 7)
    found = np.where(exponent == 0, np.ldexp(mantissa / 8, -6), normal) * np.where(codes > 127, -1, 1)
    return np.where(codes & 127 == 127, 0, found).astype(np.float32)


_E4M3 = _e4m3_values()


def _float8_tiles(packed: np.ndarray, n: int, k: int, first: int, count: int) -> np.ndarray:
    """f32 scales of 16 rows, then e4m3 [k][16]."""
    tiles, rows = _tiles_of(packed, _tile_bytes(packed, n), first, count)
    scales = np.ascontiguousarray(tiles[:, : 4 * _TILE]).view(np.float32).reshape(-1)[rows]
    codes = tiles[:, 4 * _TILE : (4 + k) * _TILE].reshape(len(tiles), k, _TILE)
    return _E4M3[codes.swapaxes(1, 2).reshape(-1, k)[rows]] * scales[:, None]


def _tile_bytes(packed: np.ndarray, n: int) -> int:
    return packed.size // -(-n // _TILE)


def _headers(parts: np.ndarray, rows: slice) -> tuple[np.ndarray, np.ndarray]:
    """Scales and zero points, float32 [rows, groups, 1]."""
    groups = parts.shape[1]
    halves = np.ascontiguousarray(parts[:, :, :32]).view(np.float16).astype(np.float32)
    scales = halves * np.ascontiguousarray(parts[:, :, 48:52]).view(np.float32)
    zeros = parts[:, :, 32:48].astype(np.float32)
    found = (part.transpose(0, 2, 1).reshape(-1, groups)[rows][..., None] for part in (scales, zeros))
    return next(found), next(found)


def _scaled(codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray) -> np.ndarray:
    return ((codes.astype(np.float32) - zeros) * scales).reshape(len(codes), -1)


# -- on GPUs ---------------------------------------------------------------------------------------------------------


def _coded_groups(bits: int) -> Reader:
    """u16 [groups, n, ..], of which element j has codes j, j + span, .. of a group from its low bits up; behind them,
    padded to 64 bytes, u32 [groups, n]: a scale, whose low 8 bits are the zero point."""

    def read(packed: np.ndarray, n: int, k: int, first: int, count: int) -> np.ndarray:
        size, rows = n * k * bits // 8, slice(first, first + count)
        words = packed[_padded(size) :].view(np.uint32)
        groups = len(words) // n
        words = words[: groups * n].reshape(groups, n)[:, rows].T
        elements = packed[:size].view(np.uint16).reshape(groups, n, -1)[:, rows]
        spans = [(elements >> np.uint16(bits * i)) & np.uint16(2**bits - 1) for i in range(16 // bits)]
        codes = np.stack(spans, axis=2).transpose(1, 0, 2, 3).reshape(count, groups, -1)
        scales = (words & np.uint32(0xFFFFFF00)).view(np.float32)
        return _scaled(codes, scales[..., None], (words & np.uint32(255)).astype(np.float32)[..., None])

    return read


def _float8_rows(packed: np.ndarray, n: int, k: int, first: int, count: int) -> np.ndarray:
    """e4m3 [n, k], and behind them, padded to 64 bytes, f32 [n]."""
    codes = packed[first * k : (first + count) * k].reshape(count, k)
    return _E4M3[codes] * packed[_padded(n * k) :].view(np.float32)[first : first + count, None]


def _signed_rows(packed: np.ndarray, n: int, k: int, first: int, count: int) -> np.ndarray:
    """i8 [n, k], and behind them, padded to 64 bytes, f32 [n]."""
    codes = packed[first * k : (first + count) * k].view(np.int8).reshape(count, 1, k)
    scales = packed[_padded(n * k) :].view(np.float32)[first : first + count]
    return _scaled(codes, scales[:, None, None], np.zeros((), np.float32))


def _padded(nbytes: int) -> int:
    return -(-nbytes // 64) * 64


_READERS: dict[str, Reader] = {
    **{kind: _dense(kind) for kind in _NUMPY},
    **{f"tile_{kind}": _dense_tiles(kind) for kind in _NUMPY},
    "q4": _coded_tiles(4),
    "q8": _coded_tiles(8),
    "q8s": _split_tiles,
    **dict.fromkeys(("e4m3", "e4m3w"), _float8_tiles),
    **dict.fromkeys(("ge4m3", "ge4m3w"), _float8_rows),
    "gq4": _coded_groups(4),
    "gq8": _coded_groups(8),
    "gi8": _signed_rows,
}

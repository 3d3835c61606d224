"""Packs weights into the layouts of `formats.py`, one weight at a time, and unpacks them for tests.

Dense weights come as numpy arrays of float32 or float16, or of uint16 holding bf16 bits; quantized ones as codes,
scales and zero points with w = (code - zero) * scale.
"""

from __future__ import annotations

import numpy as np

from .formats import HEADER, PLAIN, SPLIT, TILE, TILED, high_tile_bytes, packed_nbytes, round_up

__all__ = [
    "bf16_bits", "bf16_values", "pack_dense", "pack_quantized", "packed_nbytes", "stored_scales", "unpack_dense",
    "unpack_quantized",
]  # fmt: skip


def bf16_bits(array: np.ndarray) -> np.ndarray:
    """float32 -> uint16 bf16 bits, rounded to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) >> 16).astype(np.uint16)
    return np.where(np.isnan(array), (bits >> 16).astype(np.uint16) | np.uint16(64), rounded)


def bf16_values(bits: np.ndarray) -> np.ndarray:
    """uint16 bf16 bits -> float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _convert(array: np.ndarray, item: str) -> np.ndarray:
    """`array` in the storage type of item f32, bf16, f16 or i32; uint16 input holds bf16 bits."""
    if item == "i32":
        return array.astype(np.int32)
    if item == "bf16":
        return array if array.dtype == np.uint16 else bf16_bits(array)
    values = bf16_values(array) if array.dtype == np.uint16 else array
    return values.astype(np.float32 if item == "f32" else np.float16)


def _bytes(array: np.ndarray) -> np.ndarray:
    """The bytes of `array`, zero-padded to a multiple of 64."""
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    padding = -flat.size % 64
    return np.concatenate([flat, np.zeros(padding, np.uint8)]) if padding else flat


def pack_dense(array: np.ndarray, fmt: str) -> np.ndarray:
    """Pack `[..., N, K]` (any shape for plain formats) as `fmt`; uint8 of `packed_nbytes(fmt, shape)` bytes."""
    if fmt in PLAIN:
        return _bytes(_convert(array, fmt))
    n, k = array.shape[-2:]
    item = _convert(array, fmt.removeprefix("tile_")).reshape(-1, n, k)
    padded = round_up(n, TILE)
    tiles = np.zeros((item.shape[0], padded // TILE, k, TILE), item.dtype)
    for expert, weight in zip(tiles, item, strict=True):
        whole = n // TILE
        expert[:whole] = weight[: whole * TILE].reshape(whole, TILE, k).transpose(0, 2, 1)
        if n % TILE:
            expert[whole, :, : n % TILE] = weight[whole * TILE :].T
    return _bytes(tiles)


def unpack_dense(packed: np.ndarray, fmt: str, shape: tuple[int, ...]) -> np.ndarray:
    """Inverse of `pack_dense`, as float32 (int32 for i32)."""
    item = fmt.removeprefix("tile_")
    dtype = {"f32": np.float32, "bf16": np.uint16, "f16": np.float16, "i32": np.int32}[item]
    if fmt in TILED:
        *experts, n, k = shape
        padded = round_up(n, TILE)
        count = int(np.prod(experts, dtype=int)) * padded * k
        tiles = packed.view(dtype)[:count].reshape(-1, padded // TILE, k, TILE).transpose(0, 1, 3, 2)
        values = tiles.reshape(-1, padded, k)[:, :n].reshape(shape)
    else:
        values = packed.view(dtype)[: int(np.prod(shape, dtype=int))].reshape(shape)
    if item == "i32":
        return values
    return bf16_values(np.ascontiguousarray(values)) if item == "bf16" else values.astype(np.float32)


def _split_scales(scales: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[tiles, 16, groups] -> f16 scales relative to a power of two per (tile, group), and those powers as f32.

    The power of two keeps f16's eleven bits for scales of any magnitude.
    """
    top = np.abs(scales).max(axis=1, keepdims=True)
    unit = np.ldexp(np.float32(1.0), np.clip(np.frexp(top)[1], -125, 127)).astype(np.float32)
    return (scales / unit).astype(np.float16), unit[:, 0]


def _tiled_scales(scales: np.ndarray) -> np.ndarray:
    n, groups = scales.shape
    padded = np.zeros((round_up(n, TILE), groups), np.float32)
    padded[:n] = scales
    return padded.reshape(-1, TILE, groups)


def stored_scales(scales: np.ndarray) -> np.ndarray:
    """What the kernels multiply by for `scales` [N, K/group]: at most 2**-11 away, relatively."""
    halves, unit = _split_scales(_tiled_scales(scales))
    return (halves.astype(np.float32) * unit[:, None]).reshape(-1, scales.shape[1])[: scales.shape[0]]


def pack_quantized(codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray, fmt: str, group: int) -> np.ndarray:
    """Pack codes u8 [N, K], scales f32 and zeros u8 [N, K/group] as q4, q8 or q8s. Experts [E, N, K] go in turn."""
    if codes.ndim == 3:
        parts = zip(codes, scales, zeros, strict=True)
        return np.concatenate([pack_quantized(c, s, z, fmt, group) for c, s, z in parts])
    n, k = codes.shape
    if group % 16 or k % group:
        raise ValueError(f"group {group} must be a multiple of 16 that divides K = {k}")
    tiles, groups = round_up(n, TILE) // TILE, k // group
    halves, unit = _split_scales(_tiled_scales(scales))
    header = np.zeros((tiles, groups, HEADER), np.uint8)
    header[:, :, :32] = np.ascontiguousarray(halves.transpose(0, 2, 1)).view(np.uint8)
    header[:, :, 48:52] = np.ascontiguousarray(unit)[:, :, None].view(np.uint8)
    padded_zeros = np.zeros((tiles * TILE, groups), np.uint8)
    padded_zeros[:n] = zeros
    header[:, :, 32:48] = padded_zeros.reshape(tiles, TILE, groups).transpose(0, 2, 1)
    rows = np.zeros((tiles * TILE, k), np.uint8)
    rows[:n] = codes
    rows = rows.reshape(tiles, TILE, groups, group)
    if fmt != SPLIT:
        lines = _byte_lines(rows) if fmt == "q8" else _nibble_lines(rows)
        return np.concatenate([header, lines], axis=2).reshape(-1)
    stored = halves.astype(np.float32) * unit[:, None]
    header[:, :, 52:56] = np.ascontiguousarray(np.abs(stored).max(axis=1))[:, :, None].view(np.uint8)
    lean = leans(rows, padded_zeros.reshape(tiles, TILE, groups), stored).max(axis=1)
    header[:, :, 56:60] = np.repeat(lean[:, None], groups, axis=1)[:, :, None].view(np.uint8)
    high = np.concatenate([header, _nibble_lines(rows >> 4)], axis=2)
    return np.concatenate([high.reshape(-1), _nibble_lines(rows & 15).reshape(-1)])


def leans(codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """How far the low nibbles of each row, 7.5 taken off, point where the row does: float32 [tiles, 16].

    |r w| / |w|^2 of the row w and its low part r. The part of a product that screening does not see is that share
    of the product, and beyond it what is random. codes: [tiles, 16, groups, group]; zeros, scales: [tiles, 16, groups].
    """
    weights = codes.astype(np.float32) - zeros[..., None]
    rest = (codes & 15).astype(np.float32) - np.float32(7.5)
    squares = (scales / np.maximum(np.abs(scales).max(axis=2, keepdims=True), np.float32(1e-30))) ** 2
    along = np.einsum("trgk,trgk,trg->tr", weights, rest, squares)
    norm = np.einsum("trgk,trgk,trg->tr", weights, weights, squares)
    return np.abs(along) / np.maximum(norm, np.float32(1e-30))


def _byte_lines(rows: np.ndarray) -> np.ndarray:
    """[tiles, 16, groups, group] -> [tiles, groups, bytes], four k of a row next to each other."""
    tiles, _, groups, group = rows.shape
    lines = rows.reshape(tiles, TILE, groups, group // 4, 4)
    return lines.transpose(0, 2, 3, 1, 4).reshape(tiles, groups, -1)


def _nibble_lines(rows: np.ndarray) -> np.ndarray:
    """The same of values below 16: k 0..3 of eight in the low nibbles, k 4..7 in the high ones."""
    tiles, _, groups, group = rows.shape
    octets = rows.reshape(tiles, TILE, groups, group // 8, 2, 4)
    lines = octets[..., 0, :] | (octets[..., 1, :] << 4)  # [tiles, 16, groups, lines, 4]
    return lines.transpose(0, 2, 3, 1, 4).reshape(tiles, groups, -1)


def unpack_quantized(
    packed: np.ndarray, shape: tuple[int, int], fmt: str, group: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Inverse of `pack_quantized`: codes, scales as the kernels see them, zeros."""
    n, k = shape
    tiles, groups = round_up(n, TILE) // TILE, k // group
    split = tiles * high_tile_bytes(k, group) if fmt == SPLIT else packed.size
    parts, low = packed[:split].reshape(tiles, groups, -1), packed[split:].reshape(tiles, groups, -1)
    halves = np.ascontiguousarray(parts[:, :, :32]).view(np.float16).astype(np.float32)
    unit = np.ascontiguousarray(parts[:, :, 48:52]).view(np.float32)
    scales = (halves * unit).transpose(0, 2, 1).reshape(-1, groups)[:n]
    zeros = parts[:, :, 32:48].transpose(0, 2, 1).reshape(-1, groups)[:n]
    if fmt == "q8":
        codes = _rows_of_lines(parts[:, :, HEADER:])
    else:
        codes = _rows_of_nibble_lines(parts[:, :, HEADER:])
        codes = codes << 4 | _rows_of_nibble_lines(low) if fmt == SPLIT else codes
    return codes.reshape(-1, k)[:n], scales, zeros


def _rows_of_lines(lines: np.ndarray) -> np.ndarray:
    """Inverse of `_byte_lines`: [tiles, 16, groups, group/4, 4]."""
    return lines.reshape(*lines.shape[:2], -1, TILE, 4).transpose(0, 3, 1, 2, 4)


def _rows_of_nibble_lines(lines: np.ndarray) -> np.ndarray:
    """Inverse of `_nibble_lines`: [tiles, 16, groups, group/8, 2, 4]."""
    rows = _rows_of_lines(lines)
    return np.stack([rows & 15, rows >> 4], axis=-2)

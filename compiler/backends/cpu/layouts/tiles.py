"""The common parts of the CPU's quantized layouts: tiles of 16 output rows, their headers, and lines of codes.

Per group of k a tile has a 64-byte header (16 f16 scales, 16 u8 zero points, one f32 that multiplies the scales) and
64-byte lines of codes. A line holds 16 rows x 4 k of bytes, or 16 rows x 8 k of nibbles (k 0..3 in the low nibbles,
k 4..7 in the high ones): four consecutive k of one row in four consecutive bytes.
"""

from __future__ import annotations

import numpy as np

from .elements import round_up

TILE = 16
HEADER = 64


def tiled(array: np.ndarray) -> np.ndarray:
    """[N, X] -> [tiles, 16, X]; missing rows of the last tile are zero."""
    n, width = array.shape
    padded = np.zeros((round_up(n, TILE), width), array.dtype)
    padded[:n] = array
    return padded.reshape(-1, TILE, width)


def split_scales(scales: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[tiles, 16, groups] -> f16 scales relative to a power of two per (tile, group), and those powers as f32.

    The power of two keeps f16's eleven bits for scales of any magnitude.
    """
    top = np.abs(scales).max(axis=1, keepdims=True)
    unit = np.ldexp(np.float32(1.0), np.clip(np.frexp(top)[1], -125, 127)).astype(np.float32)
    return (scales / unit).astype(np.float16), unit[:, 0]


def stored_scales(scales: np.ndarray) -> np.ndarray:
    """The scales that kernels multiply by in place of `scales` [N, K/group]; the relative error is at most 2**-11."""
    halves, unit = split_scales(tiled(scales.astype(np.float32, copy=False)))
    return (halves.astype(np.float32) * unit[:, None]).reshape(-1, scales.shape[1])[: scales.shape[0]]


def headers(halves: np.ndarray, unit: np.ndarray, zeros: np.ndarray) -> np.ndarray:
    """Headers [tiles, groups, 64] from f16 scales and u8 zero points [tiles, 16, groups] and units [tiles, groups]."""
    tiles, _, groups = halves.shape
    header = np.zeros((tiles, groups, HEADER), np.uint8)
    header[:, :, :32] = np.ascontiguousarray(halves.transpose(0, 2, 1)).view(np.uint8)
    header[:, :, 32:48] = zeros.transpose(0, 2, 1)
    header[:, :, 48:52] = np.ascontiguousarray(unit)[:, :, None].view(np.uint8)
    return header


def of_headers(header: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Scales f32 and zero points u8 [N, groups] of headers [tiles, groups, 64 or more]."""
    groups = header.shape[1]
    halves = np.ascontiguousarray(header[:, :, :32]).view(np.float16).astype(np.float32)
    unit = np.ascontiguousarray(header[:, :, 48:52]).view(np.float32)
    scales = (halves * unit).transpose(0, 2, 1).reshape(-1, groups)[:n]
    return scales, header[:, :, 32:48].transpose(0, 2, 1).reshape(-1, groups)[:n]


def byte_lines(rows: np.ndarray) -> np.ndarray:
    """Lines of bytes: [tiles, 16, groups, group] -> [tiles, groups, bytes], four k of a row next to each other."""
    tiles, _, groups, group = rows.shape
    lines = rows.reshape(tiles, TILE, groups, group // 4, 4)
    return lines.transpose(0, 2, 3, 1, 4).reshape(tiles, groups, -1)


def nibble_lines(rows: np.ndarray) -> np.ndarray:
    """Lines of values below 16: [tiles, 16, groups, group] -> [tiles, groups, bytes], eight k of a row together: k 0 to
    3 in the low nibbles of four bytes, k 4 to 7 in the high ones."""
    tiles, _, groups, group = rows.shape
    octets = rows.reshape(tiles, TILE, groups, group // 8, 2, 4)
    lines = octets[..., 0, :] | (octets[..., 1, :] << 4)  # [tiles, 16, groups, lines, 4]
    return lines.transpose(0, 2, 3, 1, 4).reshape(tiles, groups, -1)


def of_byte_lines(lines: np.ndarray) -> np.ndarray:
    """Inverse of `byte_lines`: [tiles, 16, groups, group/4, 4]."""
    return lines.reshape(*lines.shape[:2], -1, TILE, 4).transpose(0, 3, 1, 2, 4)


def of_nibble_lines(lines: np.ndarray) -> np.ndarray:
    """Inverse of `nibble_lines`: [tiles, 16, groups, group/8, 2, 4]."""
    rows = of_byte_lines(lines)
    return np.stack([rows & 15, rows >> 4], axis=-2)

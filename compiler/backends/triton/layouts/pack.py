"""Packs quantized weights into the layout of `formats.py`, one weight at a time, and unpacks them for tests.

Dense weights are row-major: `pack_dense` of the CPU backend packs them as f32, bf16 or f16.
"""

from __future__ import annotations

import numpy as np

from .formats import codes_nbytes, matrix_nbytes


def _words(scales: np.ndarray, zeros: np.ndarray) -> np.ndarray:
    """Scale f32 and zero point u8 in one u32: the scale keeps 16 significant bits, rounded to nearest even."""
    bits = np.ascontiguousarray(scales, np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7F) + ((bits >> np.uint32(8)) & np.uint32(1))
    return (rounded & np.uint32(0xFFFFFF00)) | zeros.astype(np.uint32)


def stored_scales(scales: np.ndarray) -> np.ndarray:
    """What the kernels multiply by for `scales`: at most 2**-16 away, relatively."""
    return _words(scales, np.zeros(scales.shape, np.uint8)).view(np.float32)


def pack_quantized(codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray, bits: int, group: int) -> np.ndarray:
    """Pack codes u8 [N, K], scales f32 and zeros u8 [N, K/group] as gq4 or gq8; experts [E, N, K] one by one."""
    if codes.ndim == 3:
        parts = zip(codes, scales, zeros, strict=True)
        return np.concatenate([pack_quantized(c, s, z, bits, group) for c, s, z in parts])
    n, k = codes.shape
    if group % 16 or k % group:
        raise ValueError(f"group {group} must be a multiple of 16 that divides K = {k}")
    fields, groups = 16 // bits, k // group
    spans = codes.reshape(n, groups, fields, group // fields)
    elements = np.zeros((groups, n, group // fields), np.uint16)
    for i in range(fields):
        elements |= spans[:, :, i].transpose(1, 0, 2).astype(np.uint16) << np.uint16(bits * i)
    packed = np.zeros(matrix_nbytes(n, k, bits, group), np.uint8)
    packed[: elements.nbytes] = elements.reshape(-1).view(np.uint8)
    words = np.ascontiguousarray(_words(scales, zeros).T)
    start = codes_nbytes(n, k, bits)
    packed[start : start + words.nbytes] = words.reshape(-1).view(np.uint8)
    return packed


def unpack_quantized(
    packed: np.ndarray, shape: tuple[int, int], bits: int, group: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Inverse of `pack_quantized` for one matrix: codes, scales as the kernels see them, zeros."""
    n, k = shape
    fields, groups = 16 // bits, k // group
    elements = packed[: n * k * bits // 8].view(np.uint16).reshape(groups, n, group // fields)
    spans = [(elements >> np.uint16(bits * i)) & np.uint16(2**bits - 1) for i in range(fields)]
    codes = np.stack(spans, axis=2).transpose(1, 0, 2, 3).reshape(n, k).astype(np.uint8)
    start = codes_nbytes(n, k, bits)
    words = packed[start : start + 4 * n * groups].view(np.uint32).reshape(groups, n).T
    scales = (words & np.uint32(0xFFFFFF00)).copy().view(np.float32)
    return codes, scales, (words & np.uint32(255)).astype(np.uint8)

"""Vectors in a KV cache, in numpy: their codes, their scales and the values that they represent."""

from __future__ import annotations

import numpy as np
import torch

PACKED = {"i4": 2, "i2": 4}  # codes per byte
UNIT = 256.0  # kernels read 8-bit floats as 2^-8 of their values; scales contain the inverse


def hadamard(n: int) -> np.ndarray:
    """An orthonormal block-diagonal matrix, float64 [n, n]: blocks of 64, then of the powers of two that the rest is
    the sum of."""
    found, at, size = np.zeros((n, n)), 0, 64
    while at < n:
        while size > n - at:
            size //= 2
        signs = [[(-1) ** (i & j).bit_count() for j in range(size)] for i in range(size)]
        found[at : at + size, at : at + size] = np.array(signs) / size**0.5
        at += size
    return found


def encode(x: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Vectors [..., dim] as bytes [..., width] (int8 for i8), and the scales of each: float32 [..., 1], or for packed
    codes float16 scales and centres [..., 2]."""
    x = x.astype(np.float64)
    peak = np.abs(x).max(-1, keepdims=True)
    if dtype == "i8":
        return np.round(x * (127 / np.maximum(peak, 1e-30))).astype(np.int8), (peak / 127).astype(np.float32)
    if dtype == "f8":
        y = torch.from_numpy((x * (448 / np.maximum(peak, 1e-30))).astype(np.float32))
        return y.to(torch.float8_e4m3fn).view(torch.uint8).numpy(), (peak / 448 * UNIT).astype(np.float32)
    y, each = x @ hadamard(x.shape[-1]), PACKED[dtype]
    bits, top = 8 // each, 2 ** (8 // each) - 1
    low, high, mean = y.min(-1, keepdims=True), y.max(-1, keepdims=True), y.mean(-1, keepdims=True)
    centre = (low + high) / 2 if dtype == "i4" else mean
    unit = (high - low) / 2 / top if dtype == "i4" else 0.498 * np.sqrt(((y - mean) ** 2).mean(-1, keepdims=True))
    span = np.concatenate([unit, centre], -1).astype(np.float16)
    unit, centre = span[..., :1].astype(np.float64), span[..., 1:].astype(np.float64)
    codes = np.clip(np.floor((y - centre) / (2 * np.maximum(unit, 1e-30))) + (top + 1) // 2, 0, top).astype(np.uint8)
    fill = np.zeros((*codes.shape[:-1], -codes.shape[-1] % each), np.uint8)
    quads = np.concatenate([codes, fill], -1).reshape(*codes.shape[:-1], -1, each)
    shifts = np.arange(each, dtype=np.uint8) * np.uint8(bits)
    return np.bitwise_or.reduce(quads << shifts, axis=-1), span


def decode(codes: np.ndarray, scales: np.ndarray, dtype: str, dim: int) -> np.ndarray:
    """Inverse of `encode`, float64 [..., dim]."""
    if dtype == "i8":
        return codes * scales.astype(np.float64)
    if dtype == "f8":
        values = torch.from_numpy(codes.copy()).view(torch.float8_e4m3fn).double().numpy()
        return values / UNIT * scales
    bits, top = 8 // PACKED[dtype], 2 ** (8 // PACKED[dtype]) - 1
    fields = codes[..., None] >> (np.arange(PACKED[dtype], dtype=np.uint8) * np.uint8(bits)) & np.uint8(top)
    odd = 2.0 * fields.reshape(*codes.shape[:-1], -1)[..., :dim] - top
    return (odd * scales[..., :1].astype(np.float64) + scales[..., 1:]) @ hadamard(dim)


def stored(x: np.ndarray, dtype: str) -> np.ndarray:
    """Vectors [..., dim] as a cache of `dtype` keeps them, float64."""
    codes, scales = encode(x, dtype)
    return decode(codes, scales, dtype, x.shape[-1])

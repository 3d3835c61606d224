"""Formats of ggml whose codes stand for whole groups of values; the engine stores a code per value instead.

IQ1, IQ2 and IQ3 choose groups of values from grids, whose entries are a few numbers with a sign; TQ are ternary, NVFP4
is a table. Codes of 2 to 4 bits with the file's own scales stand for the same float32 values, and existing kernels read
them, for up to 1.8 more bits per weight than in the file.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from .blocks import BlockFormat
from .tables import GGML_NVFP4

Arrays = dict[str, np.ndarray]
_IQ1 = (-9, -7, -1, 1, 7, 9)
_IQ2 = (-43, -25, -8, 8, 25, 43)
_IQ3_XXS = (-62, -52, -44, -36, -28, -20, -12, -4, 4, 12, 20, 28, 36, 44, 52, 62)

TABLE_FORMATS = (
    BlockFormat("iq1_s", 3, 32, 256, table=_IQ1, group_scales="i8", factor=0.125),
    BlockFormat("iq1_m", 3, 16, 256, table=_IQ1, group_scales="i8", factor=0.125),
    BlockFormat("iq2_xxs", 3, 32, 256, table=_IQ2, group_scales="i8", factor=0.125),
    BlockFormat("iq2_xs", 3, 16, 256, table=_IQ2, group_scales="i8", factor=0.125),
    BlockFormat("iq2_s", 3, 16, 256, table=_IQ2, group_scales="i8", factor=0.125),
    BlockFormat("iq3_xxs", 4, 32, 256, table=_IQ3_XXS, group_scales="i8", factor=0.25),
    BlockFormat("iq3_s", 4, 32, 256, table=tuple(range(-15, 16, 2)), group_scales="i8"),
    BlockFormat("tq1_0", 2, 256, 256, zero=1),
    BlockFormat("tq2_0", 2, 256, 256, zero=1),
    GGML_NVFP4,
)


def codes_of_table(form: BlockFormat, blocks: np.ndarray) -> Arrays:
    """The parts of file blocks [..., bytes]; the `gguf` package computes the values."""
    import gguf

    if form.kind == "nvfp4":
        return _nvfp4(blocks)
    beside = _SCALES[form.kind](blocks)
    number = gguf.GGMLQuantizationType[form.kind.upper()]
    values = gguf.quants.dequantize(blocks.reshape(-1, blocks.shape[-1]), number).reshape(*blocks.shape[:-1], form.size)
    scale, _ = form.levels_of({name: torch.as_tensor(np.ascontiguousarray(value)) for name, value in beside.items()})
    unit = scale.numpy().repeat(form.group, -1)
    levels = np.array(form.table or range(-form.zero, 2**form.bits - 1 - form.zero), np.float32)
    between = (levels[1:] + levels[:-1]) / 2
    with np.errstate(divide="ignore", invalid="ignore"):
        places = np.where(unit == 0, np.float32(form.table[0] if form.table else 0), values / unit)
    return {"codes": np.searchsorted(between, places).astype(np.uint8), **beside}


def _half(b: np.ndarray, at: int) -> np.ndarray:
    return np.ascontiguousarray(b[..., at : at + 2]).view(np.float16).astype(np.float32)


def _nibbles(b: np.ndarray) -> np.ndarray:
    """The low half of each byte, followed by the high half: [.., n] -> [.., 2 n]."""
    return np.stack([b & np.uint8(15), b >> np.uint8(4)], -1).reshape(*b.shape[:-1], -1)


def _odd(scales: np.ndarray) -> np.ndarray:
    """2 s + 1 for scales s [..], as int8."""
    return (2 * scales.astype(np.int16) + 1).astype(np.int8)


def _words(b: np.ndarray, kind: type[np.unsignedinteger]) -> np.ndarray:
    return np.ascontiguousarray(b).view(kind)


def _iq2_xxs(b: np.ndarray) -> Arrays:
    return {"scales": _half(b, 0), "group_scales": _odd(_words(b[..., 2:], np.uint32)[..., 1::2] >> 28)}


def _iq2_xs(b: np.ndarray) -> Arrays:
    return {"scales": _half(b, 0), "group_scales": _odd(_nibbles(b[..., -8:]))}


def _iq3_xxs(b: np.ndarray) -> Arrays:
    return {"scales": _half(b, 0), "group_scales": _odd(_words(b[..., 66:], np.uint32) >> 28)}


def _iq3_s(b: np.ndarray) -> Arrays:
    return {"scales": _half(b, 0), "group_scales": _odd(_nibbles(b[..., -4:]))}


def _iq1_s(b: np.ndarray) -> Arrays:
    return {"scales": _half(b, 0), "group_scales": _odd(_words(b[..., 34:], np.uint16) >> 12 & 7)}


def _iq1_m(b: np.ndarray) -> Arrays:
    """Blocks [.., bytes]: the scale is in the upper four bits of four words; the lower bits hold three bits per
    group."""
    words = _words(b[..., 48:], np.uint16)
    bits = np.bitwise_or.reduce((words & np.uint16(0xF000)) >> np.array([12, 8, 4, 0], np.uint16), axis=-1)
    own = words[..., None] >> np.array([0, 3, 6, 9], np.uint16) & np.uint16(7)
    scale = bits.astype(np.uint16)[..., None].view(np.float16).astype(np.float32)
    return {"scales": scale, "group_scales": _odd(own.reshape(*words.shape[:-1], -1))}


def _last_half(b: np.ndarray) -> Arrays:
    return {"scales": _half(b, b.shape[-1] - 2)}


def _nvfp4(b: np.ndarray) -> Arrays:
    """Blocks [.., bytes]: four unsigned e4m3 scales, then 16 values for each; levels are doubled."""
    scale = b[..., :4].astype(np.int32)
    exponent, mantissa = scale >> 3 & 15, (scale & 7).astype(np.float32)
    raw = np.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    value = np.where((scale == 0) | (scale == 0x7F), 0.0, raw * 0.5).astype(np.float32)
    codes = b[..., 4:].reshape(*b.shape[:-1], 4, 1, 8) >> np.array([0, 4], np.uint8)[:, None] & np.uint8(15)
    return {"codes": codes.reshape(*b.shape[:-1], 64), "scales": value}


_SCALES: dict[str, Callable[[np.ndarray], Arrays]] = {
    "iq1_s": _iq1_s, "iq1_m": _iq1_m, "iq2_xxs": _iq2_xxs, "iq2_xs": _iq2_xs, "iq2_s": _iq2_xs, "iq3_xxs": _iq3_xxs,
    "iq3_s": _iq3_s, "tq1_0": _last_half, "tq2_0": _last_half,
}  # fmt: skip

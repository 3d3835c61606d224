"""The block formats of ggml, and the conversion of their bytes in a file to parts.

Byte layouts are those of ggml-common.h (llama.cpp); `gguf.quants.dequantize` is the reference of every value.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from .base import Parts
from .blocks import BlockFormat
from .ggml_tables import TABLE_FORMATS, codes_of_table
from .tables import IQ4_NL, IQ4_NL_FORMAT, MXFP4_FORMAT

Arrays = dict[str, np.ndarray]

GGML_FORMATS: dict[str, BlockFormat] = {
    form.kind: form
    for form in (
        BlockFormat("q4_0", 4, 32, 32, zero=8),
        BlockFormat("q4_1", 4, 32, 32, mins=True),
        BlockFormat("q5_0", 5, 32, 32, zero=16),
        BlockFormat("q5_1", 5, 32, 32, mins=True),
        BlockFormat("q8_0", 8, 32, 32, zero=128),
        BlockFormat("q2_k", 2, 16, 256, mins=True, group_scales="u4"),
        BlockFormat("q3_k", 3, 16, 256, zero=4, group_scales="i8"),
        BlockFormat("q4_k", 4, 32, 256, mins=True, group_scales="u6"),
        BlockFormat("q5_k", 5, 32, 256, mins=True, group_scales="u6"),
        BlockFormat("q6_k", 6, 16, 256, zero=32, group_scales="i8"),
        IQ4_NL_FORMAT,
        BlockFormat("iq4_xs", 4, 32, 256, table=IQ4_NL, group_scales="i8"),
        MXFP4_FORMAT,
        *TABLE_FORMATS,
    )
}


def parts_of(form: BlockFormat, blocks: Tensor) -> Parts:
    """The parts of a weight whose bytes in a file are `blocks` uint8 [..., N, blocks of a row, bytes of a block]."""
    read = _READERS.get(form.kind)
    found = codes_of_table(form, blocks.numpy()) if read is None else read(blocks.numpy())
    lead = blocks.shape[:-2]
    return {name: torch.as_tensor(np.ascontiguousarray(a)).reshape(*lead, -1) for name, a in found.items()}


def block_bytes(form: BlockFormat) -> int:
    """The bytes of a block in a file."""
    return _BYTES[form.kind]


def file_bits(name: str) -> float:
    """Bits per weight of a format in a file; infinity for a format that is not ggml's."""
    form = GGML_FORMATS.get(name)
    return 8 * _BYTES[name] / max(form.size, 64 if name == "nvfp4" else 0) if form else float("inf")


_BYTES = {
    "q4_0": 18, "q4_1": 20, "q5_0": 22, "q5_1": 24, "q8_0": 34, "q2_k": 84, "q3_k": 110, "q4_k": 144, "q5_k": 176,
    "q6_k": 210, "iq4_nl": 18, "iq4_xs": 136, "mxfp4": 17, "iq1_s": 50, "iq1_m": 56, "iq2_xxs": 66, "iq2_xs": 74,
    "iq2_s": 82, "iq3_xxs": 98, "iq3_s": 110, "tq1_0": 54, "tq2_0": 66, "nvfp4": 36,
}  # fmt: skip


def _half(block: np.ndarray, at: int) -> np.ndarray:
    """The float16 at byte `at` of each block [.., bytes], as float32 [.., 1]."""
    return np.ascontiguousarray(block[..., at : at + 2]).view(np.float16).astype(np.float32)


def _fields(packed: np.ndarray, width: int, bits: int) -> np.ndarray:
    """Fields of `bits` bits of each `width` bytes: first the lowest fields of all these bytes, then the next. [...,
    values]"""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    fields = packed.reshape(*packed.shape[:-1], -1, 1, width) >> shifts & np.uint8(2**bits - 1)
    return fields.reshape(*packed.shape[:-1], -1)


def _q4_0(b: np.ndarray) -> Arrays:
    return {"codes": _fields(b[..., 2:], 16, 4), "scales": _half(b, 0)}


def _q4_1(b: np.ndarray) -> Arrays:
    return {"codes": _fields(b[..., 4:], 16, 4), "scales": _half(b, 0), "mins": -_half(b, 2)}


def _fifth_bit(b: np.ndarray, at: int) -> np.ndarray:
    """The highest bits of codes: bit i of the four bytes at `at` of each block [.., bytes] belongs to code i."""
    return np.unpackbits(np.ascontiguousarray(b[..., at : at + 4]), axis=-1, bitorder="little") << np.uint8(4)


def _q5_0(b: np.ndarray) -> Arrays:
    return {"codes": _fields(b[..., 6:], 16, 4) | _fifth_bit(b, 2), "scales": _half(b, 0)}


def _q5_1(b: np.ndarray) -> Arrays:
    codes = _fields(b[..., 8:], 16, 4) | _fifth_bit(b, 4)
    return {"codes": codes, "scales": _half(b, 0), "mins": -_half(b, 2)}


def _q8_0(b: np.ndarray) -> Arrays:
    return {"codes": b[..., 2:] ^ np.uint8(128), "scales": _half(b, 0)}


def _q2_k(b: np.ndarray) -> Arrays:
    return {
        "codes": _fields(b[..., 16:80], 32, 2), "scales": _half(b, 80), "mins": _half(b, 82),
        "group_scales": b[..., :16] & np.uint8(15), "group_mins": b[..., :16] >> np.uint8(4),
    }  # fmt: skip


def _q3_k(b: np.ndarray) -> Arrays:
    low, high = _fields(b[..., 96:104], 8, 4), _fields(b[..., 104:108], 4, 2)
    return {
        "codes": _fields(b[..., 32:96], 32, 2) | _fields(b[..., :32], 32, 1) << np.uint8(2),
        "scales": _half(b, 108),
        "group_scales": (low | high << np.uint8(4)).astype(np.int8) - np.int8(32),
    }


def _k_scales(b: np.ndarray) -> Arrays:
    """The parts of q4_k and q5_k blocks [.., bytes] beside codes: two float16, then twelve bytes with 6 bits each for
    eight scales and eight minima."""
    scale, low, both = b[..., 4:8], b[..., 8:12], b[..., 12:16]
    top = np.uint8(0x30)
    return {
        "scales": _half(b, 0),
        "mins": _half(b, 2),
        "group_scales": np.concatenate([scale & np.uint8(63), both & np.uint8(15) | scale >> np.uint8(2) & top], -1),
        "group_mins": np.concatenate([low & np.uint8(63), both >> np.uint8(4) | low >> np.uint8(2) & top], -1),
    }


def _q4_k(b: np.ndarray) -> Arrays:
    return {"codes": _fields(b[..., 16:], 32, 4), **_k_scales(b)}


def _q5_k(b: np.ndarray) -> Arrays:
    return {"codes": _fields(b[..., 48:], 32, 4) | _fields(b[..., 16:48], 32, 1) << np.uint8(4), **_k_scales(b)}


def _q6_k(b: np.ndarray) -> Arrays:
    return {
        "codes": _fields(b[..., :128], 64, 4) | _fields(b[..., 128:192], 32, 2) << np.uint8(4),
        "scales": _half(b, 208),
        "group_scales": b[..., 192:208].view(np.int8),
    }


def _iq4_xs(b: np.ndarray) -> Arrays:
    low, high = _fields(b[..., 4:8], 1, 4), _fields(b[..., 2:4], 1, 2)
    return {
        "codes": _fields(b[..., 8:], 16, 4),
        "scales": _half(b, 0),
        "group_scales": (low | high << np.uint8(4)).astype(np.int8) - np.int8(32),
    }


def _mxfp4(b: np.ndarray) -> Arrays:
    return {"codes": _fields(b[..., 1:], 16, 4), "exponents": b[..., :1]}


_READERS: dict[str, Callable[[np.ndarray], Arrays]] = {
    "q4_0": _q4_0, "q4_1": _q4_1, "q5_0": _q5_0, "q5_1": _q5_1, "q8_0": _q8_0, "q2_k": _q2_k, "q3_k": _q3_k,
    "q4_k": _q4_k, "q5_k": _q5_k, "q6_k": _q6_k, "iq4_nl": _q4_0, "iq4_xs": _iq4_xs, "mxfp4": _mxfp4,
}  # fmt: skip

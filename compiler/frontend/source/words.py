"""Unpacks codes from 32-bit words, as GPTQ, AWQ, compressed-tensors and MLX pack them, and rounds offsets to the stored
float16."""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import TensorError


def fields(words: Tensor, bits: int) -> Tensor:
    """Fields of int32 words [..., words], lowest bits first: uint8 [..., words, fields]."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return ((words.unsqueeze(-1) >> shifts) & (2**bits - 1)).to(torch.uint8)


def columns(words: Tensor, bits: int) -> Tensor:
    """int32 words [R, C] with fields along the last axis -> uint8 [R, C * 32 / bits]. A field may cross two words."""
    if 32 % bits == 0:
        return fields(words, bits).flatten(-2)
    starts = torch.arange(0, 32 * words.shape[-1], bits)
    low, shift = starts // 32, starts % 32
    wide = words.to(torch.int64) & 0xFFFFFFFF
    high = torch.nn.functional.pad(wide, (0, 1))[..., low + 1] << (32 - shift)
    return (((wide[..., low] >> shift) | high) & (2**bits - 1)).to(torch.uint8)


def half_offsets(taken: Tensor, name: str) -> Tensor:
    """Offsets that are subtracted from the values of groups, float32 of any shape, rounded to float16. TensorError for
    the tensor `name` if one is too large."""
    found = taken.to(torch.float16).to(torch.float32)
    if not bool(torch.isfinite(found).all()):
        raise TensorError(name, "gives offsets that no half float is near", "download the checkpoint again")
    return found

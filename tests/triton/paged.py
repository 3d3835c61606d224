"""A paged KV cache for the kernel tests: pages as kv_cache.py lays them out, unwritten ones poisoned."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "i8": torch.int8}


@dataclass
class Pool:
    """`blocks` pages. `write` and `read` do what the kernels do, for one token and all heads."""

    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: str
    block_size: int
    blocks: int
    bytes: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.bytes = torch.full((self.blocks, self.block_bytes), 255, dtype=torch.uint8)  # NaN, and scales of NaN

    @property
    def _codes(self) -> int:
        return self.kv_heads * self.block_size * (self.key_dim + self.value_dim) * DTYPES[self.dtype].itemsize

    @property
    def block_bytes(self) -> int:
        scales = self.kv_heads * self.block_size * 8 if self.dtype == "i8" else 0
        return (self._codes + scales + 63) // 64 * 64

    def _vectors(self, block: int) -> tuple[Tensor, Tensor]:
        data = self.bytes[block, : self._codes].view(DTYPES[self.dtype])
        keys = self.kv_heads * self.block_size * self.key_dim
        k = data[:keys].view(self.kv_heads, self.block_size, self.key_dim)
        return k, data[keys:].view(self.kv_heads, self.block_size, self.value_dim)

    def _scales(self, block: int) -> Tensor:
        size = self.kv_heads * self.block_size * 8
        data = self.bytes[block, self._codes : self._codes + size]
        return data.view(torch.float32).view(2, self.kv_heads, self.block_size)

    def write(self, slot: int, k: Tensor, v: Tensor) -> None:
        """Store k [kv_heads, key_dim] and v; int8 codes with one scale per head."""
        block, at = divmod(slot, self.block_size)
        for i, (place, x) in enumerate(zip(self._vectors(block), (k, v), strict=True)):
            if self.dtype == "i8":
                peak = x.abs().amax(-1, keepdim=True)
                self._scales(block)[i, :, at] = peak[:, 0] / 127
                x = torch.round(x * (127 / peak.clamp(min=1e-30)))
            place[:, at] = x.to(place.dtype)

    def read(self, slot: int) -> tuple[Tensor, Tensor]:
        """The stored k and v as float64."""
        block, at = divmod(slot, self.block_size)
        k, v = (x[:, at].double() for x in self._vectors(block))
        if self.dtype == "i8":
            scales = self._scales(block)[:, :, at, None].double()
            k, v = k * scales[0], v * scales[1]
        return k, v


def tables(rows: int, width: int, style: str) -> tuple[Tensor, Tensor]:
    """cos and sin [rows, width] of a rotary embedding."""
    angle = torch.arange(rows)[:, None] * 0.3 ** torch.arange(width // 2)
    angle = angle.repeat_interleave(2, 1) if style == "interleaved" else angle.tile(2)
    return angle.cos().contiguous(), angle.sin().contiguous()

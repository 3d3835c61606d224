"""A paged KV cache for the kernel tests: pages in the layout of kv_cache.py, poisoned until they are written."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import step_making
import torch
from icc.compiler.backends.triton.kernels.caches import KV_ALIGN
from kv_codes import decode, encode
from torch import Tensor

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "i8": torch.int8}
DTYPES |= {"f8": torch.uint8, "i4": torch.uint8, "i2": torch.uint8}
PACKED = {"i4": 2, "i2": 4}  # codes per byte
CODES = ("i8", "f8", "i4", "i2")
cache = partial(step_making.cache, align=KV_ALIGN)  # a layer's cache as lowered for GPUs


@dataclass
class Pool:
    """A pool of `blocks` pages. `write` and `read` act like the kernels, for one token and all heads."""

    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: str
    block_size: int
    blocks: int
    shared: bool = False  # values are the first columns of keys
    bytes: Tensor = field(init=False)

    def __post_init__(self) -> None:
        each, align = PACKED.get(self.dtype, 1), KV_ALIGN // DTYPES[self.dtype].itemsize
        self.key_width, self.value_width = (
            -(-dim // each) if self.dtype in PACKED else -(-dim // align) * align
            for dim in (self.key_dim, 0 if self.shared else self.value_dim)
        )
        self.bytes = torch.full((self.blocks, self.block_bytes), 255, dtype=torch.uint8)  # NaN in values and scales

    @property
    def _codes(self) -> int:
        return self.kv_heads * self.block_size * (self.key_width + self.value_width) * DTYPES[self.dtype].itemsize

    @property
    def _scales_at(self) -> int:
        return (self._codes + 3) // 4 * 4

    @property
    def block_bytes(self) -> int:
        scales = self.kv_heads * self.block_size * (4 if self.shared else 8) if self.dtype in CODES else 0
        return (self._scales_at + scales + 63) // 64 * 64

    def _vectors(self, block: int) -> tuple[Tensor, Tensor]:
        data = self.bytes[block, : self._codes].view(DTYPES[self.dtype])
        keys = self.kv_heads * self.block_size * self.key_width
        k = data[:keys].view(self.kv_heads, self.block_size, self.key_width)
        return k, data[keys:].view(self.kv_heads, self.block_size, self.value_width)

    def _scales(self, block: int) -> Tensor:
        size = self.kv_heads * self.block_size * (4 if self.shared else 8)
        data = self.bytes[block, self._scales_at : self._scales_at + size]
        kind = torch.float16 if self.dtype in PACKED else torch.float32  # a scale and a centre, or a scale
        return data.view(kind).view(1 if self.shared else 2, self.kv_heads, self.block_size, -1)

    def write(self, slot: int, k: Tensor, v: Tensor) -> None:
        """Store k [kv_heads, key_dim] and v; codes with one scale per head."""
        block, at = divmod(slot, self.block_size)
        for i, (place, x) in enumerate(zip(self._vectors(block), (k,) if self.shared else (k, v), strict=False)):
            if self.dtype in CODES:
                x, scale = encode(x.numpy(), self.dtype)
                self._scales(block)[i, :, at] = torch.from_numpy(scale)
                x = torch.from_numpy(x)
            place[:, at] = 0
            place[:, at, : x.shape[1]] = x.to(place.dtype)

    def read(self, slot: int) -> tuple[Tensor, Tensor]:
        """The stored k and v as float64."""
        block, at = divmod(slot, self.block_size)
        vectors = [x[:, at] for x in self._vectors(block)]
        if self.shared:
            del vectors[1]
        if self.dtype in CODES:
            scales = self._scales(block)[:, :, at].double().numpy()
            dims = (self.key_dim, self.value_dim)
            found = [decode(x.numpy(), scales[i], self.dtype, dims[i]) for i, x in enumerate(vectors)]
            vectors = [torch.from_numpy(x) for x in found]
        k, *v = (x.double() for x in vectors)
        return k[:, : self.key_dim], (v[0] if v else k)[:, : self.value_dim]


def tables(rows: int, width: int, style: str) -> tuple[Tensor, Tensor]:
    """cos and sin [rows, width] of a rotary embedding."""
    angle = torch.arange(rows)[:, None] * 0.3 ** torch.arange(width // 2)
    angle = angle.repeat_interleave(2, 1) if style == "interleaved" else angle.tile(2)
    return angle.cos().contiguous(), angle.sin().contiguous()

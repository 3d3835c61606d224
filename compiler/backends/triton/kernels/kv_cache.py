"""The paged KV cache on a GPU: how a page lies in memory, and the kernel that writes this step's keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import ClassVar, TypeVar

from .....runtime.format.manifest import Limits
from .....runtime.format.plan import Extent, KVArg, extent
from .....runtime.format.program import ITEM_SIZE, KVLayer, KVLayout
from ....program.steps.attention import Attention as AttentionStep
from ....program.steps.attention import KVSpec
from ....program.steps.attention import KvWrite as KvWriteStep
from ...render import render
from ..spec import ELEMENTS, ONE, Arg, LaunchSpec, Shape, StepKernel, batch_arg, size_arg
from ..tiling.choice import Tuner
from .lines import power_of_two

_ROWS = 16  # (token, head) pairs that one program writes
C = TypeVar("C", KvWriteStep, AttentionStep)


@dataclass(frozen=True)
class Piece:
    """Dims [first, first + width) of a vector; the width is a power of two, and the last piece may pass its end."""

    first: int
    width: int

    @property
    def end(self) -> int:
        return self.first + self.width


def pieces(dim: int, widest: int = 256) -> tuple[Piece, ...]:
    """`dim` cut into pieces of 16 to `widest` dims: two where that pads less than one, 192 = 128 + 64."""
    first = 1 << (dim.bit_length() - 1)
    if first < dim and 16 <= first <= widest and max(power_of_two(dim - first), 16) < first:
        return (Piece(0, first), Piece(first, max(power_of_two(dim - first), 16)))
    width = min(max(power_of_two(dim), 16), widest)
    return tuple(Piece(start, width) for start in range(0, dim, width))


@dataclass(frozen=True)
class KvKernel(StepKernel[C]):
    """The geometry of one layer's pages, which begin `page_stride` elements after each other.

    A page holds keys [heads, block_size, key_dim], then values [heads, block_size, value_dim], of the cache's type; for
    i8 there follow float32 scales [heads, block_size] of the keys, then of the values.
    """

    @classmethod
    def refusal(cls, step: C) -> str:
        codes = _elements(step.kv)
        if step.kv.dtype == "i8" and codes % 4:
            return f"int8 pages of {codes} bytes: their scales would not be aligned"
        return super().refusal(step)

    @property
    def key_pad(self) -> int:
        return power_of_two(self.step.kv.key_dim)

    @property
    def value_pad(self) -> int:
        return power_of_two(self.step.kv.value_dim)

    @property
    def scaled(self) -> bool:
        """Whether the cache holds int8 codes with scales."""
        return self.step.kv.dtype == "i8"

    @property
    def _page_bytes(self) -> int:
        kv = self.step.kv
        return KVLayout(kv.block_size, kv.dtype, [KVLayer(kv.heads, kv.key_dim, kv.value_dim)]).block_bytes(0)

    @property
    def page_stride(self) -> int:
        return self._page_bytes // ITEM_SIZE[self.step.kv.dtype]

    @property
    def values_offset(self) -> int:
        kv = self.step.kv
        return kv.heads * kv.block_size * kv.key_dim

    @property
    def scale_page_stride(self) -> int:
        """As page_stride, in float32 elements; so are the two offsets below."""
        return self._page_bytes // 4

    @property
    def key_scales_offset(self) -> int:
        return _elements(self.step.kv) // 4

    @property
    def value_scales_offset(self) -> int:
        return self.key_scales_offset + self.step.kv.heads * self.step.kv.block_size

    @property
    def rope_vector(self) -> int:
        """How many neighbours of a dim have neighbouring partners in the rotation, so that one load takes them."""
        return gcd(self.step.rotary.dim // 2, 8)

    def kv_args(self) -> tuple[Arg, ...]:
        """The layer's pages, and their scales as float32 if there are any."""
        scales = (Arg("scales_ptr", "*fp32", KVArg()),) if self.scaled else ()
        return (Arg("kv_ptr", "*" + ELEMENTS[self.step.kv.dtype], KVArg()), *scales)


def _elements(kv: KVSpec) -> int:
    """Keys and values of one page."""
    return kv.heads * kv.block_size * (kv.key_dim + kv.value_dim)


@dataclass(frozen=True)
class KvWrite(KvKernel[KvWriteStep]):
    """Moves accepted guesses, then rotates k and stores both at slot_mapping."""

    template: ClassVar[str] = "triton/kv_write.py.jinja"
    entry: ClassVar[str] = "kv_write"

    @property
    def heads_per_program(self) -> int:
        return min(self.step.kv.heads, _ROWS)

    @property
    def tokens_per_program(self) -> int:
        return max(1, _ROWS // self.step.kv.heads)

    @property
    def rows_per_program(self) -> int:
        return power_of_two(self.heads_per_program * self.tokens_per_program)

    def launches(self, shape: Shape, limits: Limits, tuner: Tuner) -> tuple[LaunchSpec, ...]:
        args = self.pointers(k="k_ptr", v="v_ptr", cos="cos_ptr", sin="sin_ptr") + self.kv_args()
        args += (batch_arg("positions"), batch_arg("slot_mapping"), size_arg("num_tokens"))
        parts = -(-self.step.kv.heads // self.heads_per_program)
        grid = (extent("num_tokens", self.tokens_per_program), Extent(parts), Extent(1))
        moves = (*self.kv_args(), batch_arg("moves"), size_arg("num_moves"))
        heads_if_any = extent("num_moves", 1 << 30, self.step.kv.heads)
        return (
            LaunchSpec(render("triton/kv_move.py.jinja", self, self.step), "kv_move", moves, (heads_if_any, ONE, ONE)),
            LaunchSpec(render(self.template, self, self.step), self.entry, args, grid),
        )

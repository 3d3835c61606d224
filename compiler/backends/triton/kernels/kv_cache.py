"""The paged KV cache on a GPU: the layout of a page, and the kernel that writes this step's keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import ClassVar, TypeVar

from .....runtime.format.kv_numbers import KVNumbers
from .....runtime.format.manifest import Limits
from .....runtime.format.plan import Extent, KVArg, extent
from ....kv_formats import find_kv_format
from ....ops.kept import MIXED_BLOCK
from ....program.steps.attention import Attention, ChooseKeys, KvWrite
from ...render import render
from ..spec import ONE, Arg, LaunchSpec, Shape, StepKernel, batch_arg, size_arg
from ..tiling.choice import Tuner, power_of_two
from .caches import LONG, TRITON_CACHES, CacheElements

_ROWS = 16  # (token, head) pairs that one program writes
C = TypeVar("C", KvWrite, Attention, ChooseKeys)
R = TypeVar("R", KvWrite, Attention)


@dataclass(frozen=True)
class Piece:
    """Dims [first, first + width) of a vector; the width is a power of two, and the last piece may pass its end."""

    first: int
    width: int

    @property
    def end(self) -> int:
        """The dim behind the last one."""
        return self.first + self.width


@dataclass(frozen=True)
class MixedPiece(Piece):
    """A piece and the blocks in it that are transformed, each as `(start, size)`, in order. After a start with size 1
    nothing is transformed."""

    blocks: tuple[tuple[int, int], ...] = ()

    @staticmethod
    def of(piece: Piece, dim: int) -> MixedPiece:
        """Divide a piece into blocks of 64 dims, and the rest into powers of two; padding is not transformed."""
        found, at, size = [], piece.first, MIXED_BLOCK
        while at < min(piece.end, dim):
            while size > dim - at:
                size //= 2
            found.append((at - piece.first, size))
            at += size
        if at < piece.end:
            found.append((at - piece.first, 1))
        return MixedPiece(piece.first, piece.width, tuple(found))


def pieces(dim: int, widest: int = 256) -> tuple[Piece, ...]:
    """`dim` divided into pieces of 16 to `widest` dims: two if they need less padding than one, 192 = 128 + 64."""
    if dim > widest:
        whole = dim // widest * widest
        rest = pieces(dim - whole, widest) if whole < dim else ()
        return (
            *(Piece(first, widest) for first in range(0, whole, widest)),
            *(Piece(whole + piece.first, piece.width) for piece in rest),
        )
    first = 1 << (dim.bit_length() - 1)
    if first < dim and 16 <= first <= widest and max(power_of_two(dim - first), 16) < first:
        return (Piece(0, first), Piece(first, max(power_of_two(dim - first), 16)))
    width = min(max(power_of_two(dim), 16), widest)
    return tuple(Piece(start, width) for start in range(0, dim, width))


@dataclass(frozen=True)
class KvKernel(StepKernel[C]):
    """The geometry of one layer's pages, which are `page_stride` elements apart.

    A page holds keys [heads, block_size, key_width], then values [heads, block_size, value_width], of the cache's type,
    with zeros behind the dims; for codes there follow float32 scales [heads, block_size] of the keys, then of the
    values. Where values are shared, they are the beginning of keys, with their scales, and have no place of their own.
    Codes of 4 and 2 bits are packed, from the low bits of a byte up, and have a scale and a centre in half floats, the
    scale in the low half of four bytes; codegen_templates/cpp/kv.h documents their values and that vectors are mixed
    before they are rounded.
    """

    @classmethod
    def refusal(cls, step: C) -> str:
        return TRITON_CACHES.refusal(step.cache, step.kv) or super().refusal(step)

    @property
    def numbers(self) -> KVNumbers:
        """The number format of the cache and its sizes."""
        return find_kv_format(self.step.cache).numbers

    @property
    def cached(self) -> CacheElements:
        """How pages are read and written."""
        return TRITON_CACHES.find(self.step.cache)

    @property
    def key_pad(self) -> int:
        """A power of two that holds a key's elements, in a page and outside."""
        return power_of_two(max(self.step.kv.key_dim, self.key_width))

    @property
    def value_pad(self) -> int:
        """A power of two that holds a value's elements, in a page and outside."""
        return power_of_two(max(self.step.kv.value_dim, self.value_width))

    @property
    def scaled(self) -> bool:
        """Whether each vector has its own scale, by which its elements are multiplied."""
        return self.numbers.scaled

    @property
    def coded(self) -> bool:
        """Whether elements are codes, which macros write and read."""
        return bool(self.cached.macros)

    @property
    def packed(self) -> int:
        """Codes in a byte; 0 if elements are not packed."""
        return self.numbers.per_byte

    @property
    def top(self) -> int:
        """Packed codes stand for the odd numbers from -top to top."""
        return 2 ** (8 // max(self.packed, 1)) - 1

    @property
    def key_width(self) -> int:
        """Elements of a key in a page; bytes of packed ones."""
        return self._width(self.step.kv.key_dim)

    @property
    def value_row(self) -> int:
        """Elements from the values of one slot to those of the next."""
        return self.key_width if self.step.kv.shared else self.value_width

    @property
    def value_width(self) -> int:
        """Elements of a value in a page; bytes of packed ones."""
        return self._width(self.step.kv.value_dim)

    @property
    def padded(self) -> bool:
        """Whether a vector in a page has another length than its dims: it is packed, or followed by zeros."""
        kv = self.step.kv
        return self.packed > 0 or (self.key_width, self.value_width) != (kv.key_dim, kv.value_dim)

    def _width(self, dim: int) -> int:
        return self.numbers.vector_bytes(dim, self.step.kv.align) // self.numbers.item_size

    @property
    def key_width_pad(self) -> int:
        """A power of two that holds `key_width`."""
        return power_of_two(self.key_width)

    @property
    def value_width_pad(self) -> int:
        """A power of two that holds `value_width`."""
        return power_of_two(self.value_width)

    def mixing(self, dim: int) -> tuple[MixedPiece, ...]:
        """Pieces of a vector that are mixed on their own."""
        return tuple(MixedPiece.of(piece, dim) for piece in pieces(dim, MIXED_BLOCK))

    @property
    def _page_bytes(self) -> int:
        return self.step.kv.block_bytes(self.step.block_size, self.numbers)

    @property
    def page_stride(self) -> int:
        """Elements of the cache from one page to the next."""
        return self._page_bytes // self.numbers.item_size

    @property
    def values_offset(self) -> int:
        """Where the values begin in a page, in elements; 0 if they are the beginning of the keys."""
        kv = self.step.kv
        return 0 if kv.shared else kv.kv_heads * self.step.block_size * self.key_width

    @property
    def scale_page_stride(self) -> int:
        """Elements of four bytes from one page to the next."""
        return self._page_bytes // 4

    @property
    def key_scales_offset(self) -> int:
        """Where the scales of keys begin in a page, in elements of four bytes."""
        kv = self.step.kv
        return (kv.kv_heads * self.step.block_size * (self.key_width + (0 if kv.shared else self.value_width)) + 3) // 4

    @property
    def value_scales_offset(self) -> int:
        """Where the scales of values begin in a page, in elements of four bytes; the scales of keys if values are
        shared."""
        kv = self.step.kv
        return self.key_scales_offset + (0 if kv.shared else kv.kv_heads * self.step.block_size)

    @property
    def key_pieces(self) -> tuple[Piece, ...]:
        """The pieces of a key that products read at a time."""
        return self.mixing(self.step.kv.key_dim) if self.packed else pieces(self.step.kv.key_dim)

    def kv_args(self) -> tuple[Arg, ...]:
        """The layer's pages, and their scales if there are any: float32, or two half floats in an integer."""
        scales = (Arg("scales_ptr", "*i32" if self.packed else "*fp32", KVArg()),) if self.scaled else ()
        return (Arg("kv_ptr", "*" + self.cached.element, KVArg()), *scales)


def product_type(q: str, cached: CacheElements) -> str:
    """Triton's type of both operands of q k': the type in which the cache's elements are multiplied; for codes q's
    type, or bfloat16 if q is float32."""
    return cached.product or ("bfloat16" if q == "f32" else LONG[q])


@dataclass(frozen=True)
class RotatingKernel(KvKernel[R]):
    """A kernel that rotates keys or queries (rotary embedding) as it reads them."""

    @property
    def rope_vector(self) -> int:
        """How many neighbouring dims have neighbouring partners in the rotation, so that one load reads them."""
        return gcd(self.step.rotary.dim // 2, 8)


@dataclass(frozen=True)
class KvWriteKernel(RotatingKernel[KvWrite]):
    """Moves accepted drafts, then rotates k and stores k and v at slot_mapping."""

    template: ClassVar[str] = "triton/kv_write.py.jinja"
    entry: ClassVar[str] = "kv_write"

    @property
    def heads_per_program(self) -> int:
        """KV heads that a program stores."""
        return min(self.step.kv.kv_heads, _ROWS)

    @property
    def tokens_per_program(self) -> int:
        """Tokens that a program stores."""
        return max(1, _ROWS // self.step.kv.kv_heads)

    @property
    def rows_per_program(self) -> int:
        """A power of two that holds the (token, head) pairs of a program."""
        return power_of_two(self.heads_per_program * self.tokens_per_program)

    def launches(self, shape: Shape, limits: Limits, tuner: Tuner) -> tuple[LaunchSpec, ...]:
        args = self.pointers(k="k_ptr", v="v_ptr", cos="cos_ptr", sin="sin_ptr") + self.kv_args()
        args += (batch_arg("positions"), batch_arg("slot_mapping"), size_arg("num_tokens"))
        parts = -(-self.step.kv.kv_heads // self.heads_per_program)
        grid = (extent("num_tokens", self.tokens_per_program), Extent(parts), Extent(1))
        moves = (*self.kv_args(), batch_arg("moves"), size_arg("num_moves"))
        heads_if_any = extent("num_moves", 1 << 30, self.step.kv.kv_heads)
        return (
            LaunchSpec(render("triton/kv_move.py.jinja", self, self.step), "kv_move", moves, (heads_if_any, ONE, ONE)),
            LaunchSpec(render(self.template, self, self.step), self.entry, args, grid),
        )

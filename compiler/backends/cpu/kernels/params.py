"""What each kernel template takes: one frozen dataclass per lowered op, built and checked from `Kernel.params`.

A field without default is a param that the lowering must give; properties are what the templates derive. The docstrings
list the operands in order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from ..layouts.affine import quant_tile_bytes
from ..layouts.elements import C_TYPES, PLAIN
from ..layouts.split import high_tile_bytes, low_tile_bytes

QUANT_BITS = {"q4": 4, "q8": 8, "q8s": 8}
SPLIT = "q8s"
SCREENED_ROWS = 6  # with more rows a head takes its time for arithmetic, not for reading


def contiguous(width: Callable[[Any], int]) -> Any:
    """A stride between rows; -1, the default, stands for `width(params)`: the rows lie next to each other."""
    return field(default=-1, metadata={"contiguous": width})


@dataclass(frozen=True, kw_only=True)
class KernelParams:
    """Common to all kernels: the C++ function's name and what one row is (a token or a wanted logit row)."""

    template: ClassVar[str]
    fn: str
    rows: str = "tokens"

    def __post_init__(self) -> None:
        for f in fields(self):
            if "contiguous" in f.metadata and getattr(self, f.name) < 0:
                object.__setattr__(self, f.name, f.metadata["contiguous"](self))

    @property
    def row_count(self) -> str:
        """C++ expression for the number of rows."""
        return "c.logit_rows()" if self.rows == "logit_rows" else "c.tokens()"


@dataclass(frozen=True, kw_only=True)
class DenseParams(KernelParams):
    """Common to products with a weight in `tile_<format>`."""

    k: int
    n: int
    format: str
    has_bias: bool = False

    @property
    def item(self) -> int:
        return PLAIN[self.format]

    @property
    def table(self) -> str:
        return f"DENSE_{self.format.upper()}"


@dataclass(frozen=True, kw_only=True)
class QuantParams(KernelParams):
    """Common to products of int8 activations with a weight in q4, q8 or, where 8 bits are split, q8s."""

    k: int
    n: int
    bits: int
    group: int
    has_bias: bool = False
    split: bool = False

    @property
    def groups(self) -> int:
        return self.k // self.group

    @property
    def tile_bytes(self) -> int:
        return high_tile_bytes(self.k, self.group) if self.split else quant_tile_bytes(self.k, self.bits, self.group)

    @property
    def low_bytes(self) -> int:
        """Of a tile in the second plane; 0 where there is none."""
        return low_tile_bytes(self.k) if self.split else 0

    @property
    def table(self) -> str:
        return f"QUANT_Q{self.bits}{'S' if self.split else ''}"


@dataclass(frozen=True, kw_only=True)
class LinearParams(DenseParams):
    """y = x W^T. Operands: x, W, bias, residual -> y."""

    template: ClassVar[str] = "cpp/linear/linear.cpp.jinja"
    has_residual: bool = False
    x_stride: int = contiguous(lambda p: p.k)
    y_stride: int = contiguous(lambda p: p.n)
    residual_stride: int = contiguous(lambda p: p.n)


@dataclass(frozen=True, kw_only=True)
class LinearQParams(QuantParams):
    """y = x W^T. Operands: q, scales, sums, W, bias, residual -> y. `screened`: a split weight's product that gives the
    logits, of which a greedy batch wants only the largest."""

    template: ClassVar[str] = "cpp/linear/linear_q.cpp.jinja"
    screened: bool = False
    has_residual: bool = False
    y_stride: int = contiguous(lambda p: p.n)
    residual_stride: int = contiguous(lambda p: p.n)

    @property
    def screen_table(self) -> str:
        return f"{self.table}_HIGH"

    def screen_bytes(self) -> int:
        """Scratch of a thread that screens: a panel, a norm per row and group, and a margin per row and tile."""
        rows, tiles = SCREENED_ROWS, self.n // 16 + 1
        return rows * (self.k + 8 * self.groups) + 4 * rows * (self.groups + tiles) + 3 * 64


@dataclass(frozen=True, kw_only=True)
class ExpertLinearParams(DenseParams):
    """Dense experts. Operands: x, W, bias [E, N], index -> y [topk, N]."""

    template: ClassVar[str] = "cpp/linear/expert_linear.cpp.jinja"
    experts: int
    topk: int
    x_per_slot: bool = False
    x_stride: int = contiguous(lambda p: p.k * (p.topk if p.x_per_slot else 1))


@dataclass(frozen=True, kw_only=True)
class ExpertLinearQParams(QuantParams):
    """Quantized experts. Operands: q, scales, sums, W, bias [E, N], index -> y [topk, N]."""

    template: ClassVar[str] = "cpp/linear/expert_linear_q.cpp.jinja"
    experts: int
    topk: int
    x_per_slot: bool = False


@dataclass(frozen=True, kw_only=True)
class QuantizeRowsParams(KernelParams):
    """x -> q i8 [K], scales f32 [K/group], sums f32 [K/group]."""

    template: ClassVar[str] = "cpp/linear/quantize_rows.cpp.jinja"
    k: int
    group: int
    x_stride: int = contiguous(lambda p: p.k)

    @property
    def groups(self) -> int:
        return self.k // self.group


@dataclass(frozen=True, kw_only=True)
class EmbeddingParams(KernelParams):
    """ids, W -> y. `table_rows` is the number of rows of W; its format may be plain, tiled, q4, q8 or q8s."""

    template: ClassVar[str] = "cpp/embedding/embedding.cpp.jinja"
    n: int
    table_rows: int
    format: str
    group: int = 128
    y_stride: int = contiguous(lambda p: p.n)

    @property
    def bits(self) -> int:
        return QUANT_BITS.get(self.format, 0)

    @property
    def split(self) -> bool:
        return self.format == SPLIT

    @property
    def tiled(self) -> bool:
        return self.format.startswith(("tile_", "q"))

    @property
    def ctype(self) -> str:
        return C_TYPES[self.format.removeprefix("tile_")]

    @property
    def nibbles(self) -> bool:
        return self.bits == 4 or self.split

    @property
    def tile_bytes(self) -> int:
        return high_tile_bytes(self.n, self.group) if self.nibbles else quant_tile_bytes(self.n, self.bits, self.group)

    @property
    def low_plane(self) -> int:
        """Where the second plane begins."""
        return (self.table_rows + 15) // 16 * self.tile_bytes


@dataclass(frozen=True, kw_only=True)
class SelectRowsParams(KernelParams):
    """x -> y: the rows `batch.logit_rows` of x."""

    template: ClassVar[str] = "cpp/embedding/select_rows.cpp.jinja"
    n: int
    x_stride: int = contiguous(lambda p: p.n)
    y_stride: int = contiguous(lambda p: p.n)
    dtype: str = "f32"

    @property
    def ctype(self) -> str:
        return C_TYPES[self.dtype]


@dataclass(frozen=True, kw_only=True)
class NormParams(KernelParams):
    """Shared by the norms: `groups` vectors of `d` per row; `add` sums x and r first."""

    d: int
    eps: float
    groups: int = 1
    has_weight: bool = True
    add: bool = False
    x_stride: int = contiguous(lambda p: p.d * p.groups)
    y_stride: int = contiguous(lambda p: p.d * p.groups)
    r_stride: int = contiguous(lambda p: p.d * p.groups)
    sum_stride: int = contiguous(lambda p: p.d * p.groups)

    @property
    def eps_text(self) -> str:
        return f"{float(self.eps)!r}f"


@dataclass(frozen=True, kw_only=True)
class RmsNormParams(NormParams):
    """rms_norm: x, w -> y; add_rms_norm: x, r, w -> y, sum."""

    template: ClassVar[str] = "cpp/norm/rms_norm.cpp.jinja"


@dataclass(frozen=True, kw_only=True)
class LayerNormParams(NormParams):
    """layer_norm: x, w, b -> y; add_layer_norm: x, r, w, b -> y, sum."""

    template: ClassVar[str] = "cpp/norm/layer_norm.cpp.jinja"
    has_bias: bool = True

"""What each kernel template takes: one frozen dataclass per lowered op, built and checked from `Kernel.params`.

A field without default is a param that the lowering must give; properties are what the templates derive. The docstrings
list the operands in order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from .formats import C_TYPES, PLAIN, quant_tile_bytes


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
    """Common to products of int8 activations with a weight in q4 or q8."""

    k: int
    n: int
    bits: int
    group: int
    has_bias: bool = False

    @property
    def groups(self) -> int:
        return self.k // self.group

    @property
    def tile_bytes(self) -> int:
        return quant_tile_bytes(self.k, self.bits, self.group)

    @property
    def table(self) -> str:
        return f"QUANT_Q{self.bits}"


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
    """y = x W^T. Operands: q, scales, sums, W, bias, residual -> y."""

    template: ClassVar[str] = "cpp/linear/linear_q.cpp.jinja"
    has_residual: bool = False
    y_stride: int = contiguous(lambda p: p.n)
    residual_stride: int = contiguous(lambda p: p.n)


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
    """ids, W -> y. `table_rows` (alias `vocab`) is the number of rows of W; format may be plain, tiled, q4 or q8."""

    template: ClassVar[str] = "cpp/embedding/embedding.cpp.jinja"
    n: int
    table_rows: int
    format: str
    group: int = 128
    y_stride: int = contiguous(lambda p: p.n)

    @property
    def bits(self) -> int:
        return {"q4": 4, "q8": 8}.get(self.format, 0)

    @property
    def tiled(self) -> bool:
        return self.format.startswith(("tile_", "q"))

    @property
    def ctype(self) -> str:
        return C_TYPES[self.format.removeprefix("tile_")]

    @property
    def tile_bytes(self) -> int:
        return quant_tile_bytes(self.n, self.bits, self.group)


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

"""What each kernel template takes: one frozen dataclass per lowered op, built and checked from `Kernel.params`.

A field without default is a param that the lowering must give; strides default to contiguous rows (-1). `inputs` and
`outputs` list the operands in order with their element types; properties are what the templates derive.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .formats import C_TYPES, PLAIN, quant_tile_bytes


@dataclass(frozen=True, kw_only=True)
class KernelParams:
    """Common to all kernels: the C++ function's name and what one row is (a token or a wanted logit row)."""

    template: ClassVar[str]
    fn: str
    rows: str = "tokens"

    @property
    def row_count(self) -> str:
        """C++ expression for the number of rows."""
        return "c.logit_rows()" if self.rows == "logit_rows" else "c.tokens()"


def _dense(stride: int, width: int) -> int:
    return width if stride < 0 else stride


@dataclass(frozen=True, kw_only=True)
class LinearParams(KernelParams):
    """y = x W^T; W in `tile_<format>`. Operands: x, W, bias, residual -> y."""

    template: ClassVar[str] = "cpp/linear/linear.cpp.jinja"
    k: int
    n: int
    format: str
    x_stride: int = -1
    y_stride: int = -1
    has_bias: bool = False
    has_residual: bool = False
    residual_stride: int = -1

    def __post_init__(self) -> None:
        object.__setattr__(self, "x_stride", _dense(self.x_stride, self.k))
        object.__setattr__(self, "y_stride", _dense(self.y_stride, self.n))
        object.__setattr__(self, "residual_stride", _dense(self.residual_stride, self.n))

    @property
    def item(self) -> int:
        return PLAIN[self.format]

    @property
    def table(self) -> str:
        return f"DENSE_{self.format.upper()}"


@dataclass(frozen=True, kw_only=True)
class LinearQParams(KernelParams):
    """y = x W^T with int8 activations; W in q4 or q8. Operands: q, scales, sums, W, bias, residual -> y."""

    template: ClassVar[str] = "cpp/linear/linear_q.cpp.jinja"
    k: int
    n: int
    bits: int
    group: int
    y_stride: int = -1
    has_bias: bool = False
    has_residual: bool = False
    residual_stride: int = -1

    def __post_init__(self) -> None:
        object.__setattr__(self, "y_stride", _dense(self.y_stride, self.n))
        object.__setattr__(self, "residual_stride", _dense(self.residual_stride, self.n))

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
class ExpertLinearParams(KernelParams):
    """Dense experts. Operands: x, W, bias [E, N], index -> y [topk, N]."""

    template: ClassVar[str] = "cpp/linear/expert_linear.cpp.jinja"
    k: int
    n: int
    experts: int
    topk: int
    format: str
    x_per_slot: bool = False
    has_bias: bool = False
    x_stride: int = -1

    def __post_init__(self) -> None:
        object.__setattr__(self, "x_stride", _dense(self.x_stride, self.k * (self.topk if self.x_per_slot else 1)))

    @property
    def item(self) -> int:
        return PLAIN[self.format]

    @property
    def table(self) -> str:
        return f"DENSE_{self.format.upper()}"


@dataclass(frozen=True, kw_only=True)
class ExpertLinearQParams(KernelParams):
    """Quantized experts. Operands: q, scales, sums, W, bias [E, N], index -> y [topk, N]."""

    template: ClassVar[str] = "cpp/linear/expert_linear_q.cpp.jinja"
    k: int
    n: int
    experts: int
    topk: int
    bits: int
    group: int
    x_per_slot: bool = False
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
class QuantizeRowsParams(KernelParams):
    """x -> q i8 [K], scales f32 [K/group], sums f32 [K/group]."""

    template: ClassVar[str] = "cpp/linear/quantize_rows.cpp.jinja"
    k: int
    group: int
    x_stride: int = -1

    def __post_init__(self) -> None:
        object.__setattr__(self, "x_stride", _dense(self.x_stride, self.k))

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
    y_stride: int = -1

    def __post_init__(self) -> None:
        object.__setattr__(self, "y_stride", _dense(self.y_stride, self.n))

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
    x_stride: int = -1
    y_stride: int = -1
    dtype: str = "f32"

    def __post_init__(self) -> None:
        object.__setattr__(self, "x_stride", _dense(self.x_stride, self.n))
        object.__setattr__(self, "y_stride", _dense(self.y_stride, self.n))

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
    x_stride: int = -1
    y_stride: int = -1
    r_stride: int = -1
    sum_stride: int = -1

    def __post_init__(self) -> None:
        for name in ("x_stride", "y_stride", "r_stride", "sum_stride"):
            object.__setattr__(self, name, _dense(getattr(self, name), self.d * self.groups))
        object.__setattr__(self, "eps", f"{float(self.eps)!r}f")


@dataclass(frozen=True, kw_only=True)
class RmsNormParams(NormParams):
    """rms_norm: x, w -> y; add_rms_norm: x, r, w -> y, sum."""

    template: ClassVar[str] = "cpp/norm/rms_norm.cpp.jinja"


@dataclass(frozen=True, kw_only=True)
class LayerNormParams(NormParams):
    """layer_norm: x, w, b -> y; add_layer_norm: x, r, w, b -> y, sum."""

    template: ClassVar[str] = "cpp/norm/layer_norm.cpp.jinja"
    has_bias: bool = True

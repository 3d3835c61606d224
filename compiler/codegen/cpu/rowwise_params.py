"""Params of the kernels over one axis of each row (router arithmetic, per-token products). See `params.py`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from .formats import C_TYPES
from .params import KernelParams


@dataclass(frozen=True, kw_only=True)
class RowwiseParams(KernelParams):
    """x [outer, n] per row -> y; strides are between rows, -1 for contiguous."""

    outer: int
    n: int
    dtype: str = "f32"
    x_stride: int = -1
    y_stride: int = -1

    def widths(self) -> dict[str, int]:
        """Contiguous row width of each operand that has a stride."""
        return {"x_stride": self.outer * self.n, "y_stride": self.outer * self.n}

    def __post_init__(self) -> None:
        for name, width in self.widths().items():
            if getattr(self, name) < 0:
                object.__setattr__(self, name, width)

    @property
    def ctype(self) -> str:
        return C_TYPES[self.dtype]


@dataclass(frozen=True, kw_only=True)
class ReduceParams(RowwiseParams):
    """x [outer, n, inner] -> y [outer, inner]; op sum, mean, amax, amin, prod or argmax (i32)."""

    template: ClassVar[str] = "cpp/rowwise/reduce.cpp.jinja"
    op: str
    inner: int = 1

    def widths(self) -> dict[str, int]:
        return {"x_stride": self.outer * self.n * self.inner, "y_stride": self.outer * self.inner}

    @property
    def out_ctype(self) -> str:
        return "int32_t" if self.op == "argmax" else self.ctype


@dataclass(frozen=True, kw_only=True)
class SoftmaxParams(RowwiseParams):
    """x -> y."""

    template: ClassVar[str] = "cpp/rowwise/softmax.cpp.jinja"


@dataclass(frozen=True, kw_only=True)
class CumsumParams(RowwiseParams):
    """x -> y."""

    template: ClassVar[str] = "cpp/rowwise/cumsum.cpp.jinja"


@dataclass(frozen=True, kw_only=True)
class TopkParams(RowwiseParams):
    """x -> values, indices [outer, k]."""

    template: ClassVar[str] = "cpp/rowwise/topk.cpp.jinja"
    k: int
    largest: bool = True
    values_stride: int = -1
    indices_stride: int = -1

    def widths(self) -> dict[str, int]:
        out = self.outer * self.k
        return {"x_stride": self.outer * self.n, "values_stride": out, "indices_stride": out}


@dataclass(frozen=True, kw_only=True)
class GatherParams(RowwiseParams):
    """x, index [outer, m] -> y [outer, m]."""

    template: ClassVar[str] = "cpp/rowwise/gather.cpp.jinja"
    m: int
    index_stride: int = -1

    def widths(self) -> dict[str, int]:
        out = self.outer * self.m
        return {"x_stride": self.outer * self.n, "index_stride": out, "y_stride": out}


@dataclass(frozen=True, kw_only=True)
class ScatterParams(RowwiseParams):
    """x, index [outer, m], src -> y [outer, n]; src "tensor" or "value"; reduce "none" or "add".

    `value` may be text ("-inf"), because JSON has no infinities."""

    template: ClassVar[str] = "cpp/rowwise/scatter.cpp.jinja"
    m: int
    reduce: str = "none"
    src: str = "tensor"
    value: float | str = 0.0
    index_stride: int = -1
    src_stride: int = -1

    def widths(self) -> dict[str, int]:
        wide, narrow = self.outer * self.n, self.outer * self.m
        return {"x_stride": wide, "y_stride": wide, "index_stride": narrow, "src_stride": narrow}

    @property
    def value_text(self) -> str:
        """The value as a C++ expression."""
        value = float(self.value)
        if math.isnan(value):
            return "NAN"
        if value in (float("inf"), float("-inf")):
            return "INFINITY" if value > 0 else "(-INFINITY)"
        return f"({value!r}f)"


@dataclass(frozen=True, kw_only=True)
class BmmParams(KernelParams):
    """a [batch, m, k], b [batch, k, n] (or [batch, n, k]) -> c [batch, m, n]; b_row_stride 0: b is a weight."""

    template: ClassVar[str] = "cpp/rowwise/bmm.cpp.jinja"
    batch: int
    m: int
    k: int
    n: int
    b_transposed: bool = False
    a_row_stride: int = -1
    b_row_stride: int = -1
    c_row_stride: int = -1

    def __post_init__(self) -> None:
        sizes = {"a": self.m * self.k, "b": self.k * self.n, "c": self.m * self.n}
        for name, size in sizes.items():
            if getattr(self, f"{name}_row_stride") < 0:
                object.__setattr__(self, f"{name}_row_stride", self.batch * size)

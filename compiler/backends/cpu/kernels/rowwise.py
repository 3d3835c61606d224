"""Params of the kernels over one axis of each row (router arithmetic, per-token products). See `params.py`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from ..layouts.elements import C_TYPES
from .params import KernelParams, contiguous


@dataclass(frozen=True, kw_only=True)
class RowwiseParams(KernelParams):
    """x [outer, n] per row -> y."""

    outer: int
    n: int
    dtype: str = "f32"
    x_stride: int = contiguous(lambda p: p.outer * p.n)
    y_stride: int = contiguous(lambda p: p.outer * p.n)

    @property
    def ctype(self) -> str:
        return C_TYPES[self.dtype]


@dataclass(frozen=True, kw_only=True)
class ReduceParams(RowwiseParams):
    """x [outer, n, inner] -> y [outer, inner]; op sum, mean, amax, amin, prod or argmax (i32)."""

    template: ClassVar[str] = "cpp/rowwise/reduce.cpp.jinja"
    op: str
    inner: int = 1
    x_stride: int = contiguous(lambda p: p.outer * p.n * p.inner)
    y_stride: int = contiguous(lambda p: p.outer * p.inner)

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
    values_stride: int = contiguous(lambda p: p.outer * p.k)
    indices_stride: int = contiguous(lambda p: p.outer * p.k)


@dataclass(frozen=True, kw_only=True)
class GatherParams(RowwiseParams):
    """x, index [outer, m] -> y [outer, m]."""

    template: ClassVar[str] = "cpp/rowwise/gather.cpp.jinja"
    m: int
    index_stride: int = contiguous(lambda p: p.outer * p.m)
    y_stride: int = contiguous(lambda p: p.outer * p.m)


@dataclass(frozen=True, kw_only=True)
class ScatterParams(RowwiseParams):
    """x, index [outer, m], src -> y [outer, n]; src "tensor" or "value"; reduce "none" or "add".

    `value` may be text ("-inf"), because JSON has no infinities."""

    template: ClassVar[str] = "cpp/rowwise/scatter.cpp.jinja"
    m: int
    reduce: str = "none"
    src: str = "tensor"
    value: float | str = 0.0
    index_stride: int = contiguous(lambda p: p.outer * p.m)
    src_stride: int = contiguous(lambda p: p.outer * p.m)

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
    a_row_stride: int = contiguous(lambda p: p.batch * p.m * p.k)
    b_row_stride: int = contiguous(lambda p: p.batch * p.k * p.n)
    c_row_stride: int = contiguous(lambda p: p.batch * p.m * p.n)

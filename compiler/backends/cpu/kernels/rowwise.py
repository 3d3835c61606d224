"""Kernels over one axis of each row (router arithmetic, per-token products)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from ....program.steps.rowwise import Bmm, Cumsum, Gather, Hadamard, Lines, Reduce, Scatter, Softmax, Topk
from .base import KernelParams, ctype

L = TypeVar("L", bound=Lines)


@dataclass(frozen=True)
class LinesParams(KernelParams[L]):
    """Parameters of kernels that work on a row line by line."""

    @property
    def dtype(self) -> str:
        """The element type of x, such as "f32"."""
        return self.step.x.dtype

    @property
    def ctype(self) -> str:
        """The C++ element type of x."""
        return ctype(self.step.x)


@dataclass(frozen=True)
class ReduceParams(LinesParams[Reduce]):
    """A reduction over one axis."""

    template: ClassVar[str] = "cpp/rowwise/reduce.cpp.jinja"

    @property
    def out_ctype(self) -> str:
        """The C++ element type of y."""
        return "int32_t" if self.step.reduction == "argmax" else self.ctype


@dataclass(frozen=True)
class SoftmaxParams(LinesParams[Softmax]):
    """y = softmax(x)."""

    template: ClassVar[str] = "cpp/rowwise/softmax.cpp.jinja"


@dataclass(frozen=True)
class CumsumParams(LinesParams[Cumsum]):
    """Running sums."""

    template: ClassVar[str] = "cpp/rowwise/cumsum.cpp.jinja"


@dataclass(frozen=True)
class HadamardParams(LinesParams[Hadamard]):
    """Walsh-Hadamard transforms."""

    template: ClassVar[str] = "cpp/rowwise/hadamard.cpp.jinja"

    @property
    def scale(self) -> float:
        """The factor that makes the transform orthonormal."""
        return 1 / math.sqrt(self.step.n)


@dataclass(frozen=True)
class TopkParams(LinesParams[Topk]):
    """The largest or smallest of each line."""

    template: ClassVar[str] = "cpp/rowwise/topk.cpp.jinja"


@dataclass(frozen=True)
class GatherParams(LinesParams[Gather]):
    """Indexed reads."""

    template: ClassVar[str] = "cpp/rowwise/gather.cpp.jinja"


@dataclass(frozen=True)
class ScatterParams(LinesParams[Scatter]):
    """Indexed writes."""

    template: ClassVar[str] = "cpp/rowwise/scatter.cpp.jinja"

    @property
    def value_text(self) -> str:
        """The value as a C++ expression."""
        value = float(self.step.value)
        if math.isnan(value):
            return "NAN"
        if value in (float("inf"), float("-inf")):
            return "INFINITY" if value > 0 else "(-INFINITY)"
        return f"({value!r}f)"


@dataclass(frozen=True)
class BmmParams(KernelParams[Bmm]):
    """Products of each row's own matrices, or with one weight."""

    template: ClassVar[str] = "cpp/rowwise/bmm.cpp.jinja"

"""Reductions, softmax and running sums over one axis of each row."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from ....program.steps import rowwise as steps
from .lines import LinesKernel


@dataclass(frozen=True)
class ReduceKernel(LinesKernel[steps.Reduce]):
    """x [rows, outer, n, inner] -> y [rows, outer, inner]."""

    template: ClassVar[str] = "triton/reduce.py.jinja"
    entry: ClassVar[str] = "reduce"

    @property
    def lines(self) -> int:
        return self.step.outer * self.step.inner

    @property
    def sorts(self) -> bool:
        """Whether elements are compared as integer keys: NaN must win, which Triton's max does not guarantee."""
        return self.step.reduction in ("amax", "amin", "argmax")

    @property
    def initial(self) -> str:
        """The value of elements outside the line, and the start value of the accumulators."""
        number = {"sum": "0", "mean": "0", "prod": "1", "amin": "0x7FFFFFFF"}.get(self.step.reduction, "LOWEST")
        return number if self.whole or self.sorts else f"{number}.0"


@dataclass(frozen=True)
class SoftmaxKernel(LinesKernel[steps.Softmax]):
    """y = softmax(x) over lines; y may be the memory of x."""

    template: ClassVar[str] = "triton/softmax.py.jinja"
    entry: ClassVar[str] = "softmax"
    max_width: ClassVar[int] = 8192


@dataclass(frozen=True)
class HadamardKernel(LinesKernel[steps.Hadamard]):
    """y = the Walsh-Hadamard transform of each line; y may be the memory of x."""

    template: ClassVar[str] = "triton/hadamard.py.jinja"
    entry: ClassVar[str] = "hadamard"

    @property
    def levels(self) -> int:
        """The number of rounds in which elements are combined in pairs."""
        return self.step.n.bit_length() - 1

    @property
    def scale(self) -> float:
        """The factor that makes the transform orthonormal."""
        return 1 / math.sqrt(self.step.n)


@dataclass(frozen=True)
class CumsumKernel(LinesKernel[steps.Cumsum]):
    """y = running sum of x along lines."""

    template: ClassVar[str] = "triton/cumsum.py.jinja"
    entry: ClassVar[str] = "cumsum"
    max_width: ClassVar[int] = 4096

"""Ops along one axis of each row, and products of each row's own matrices."""

from __future__ import annotations

from typing import ClassVar, Literal

from ....runtime.format.operands import Operand
from ...ops.hadamard import MAX_BLOCK, MIN_BLOCK
from .base import VALUES, Step, step_type

_INDEX = ("i32",)


class Lines(Step, frozen=True, kw_only=True):
    """x [outer, n] of each row, line by line."""

    DTYPES: ClassVar = {"x": VALUES, "y": VALUES}
    x: Operand
    outer: int
    n: int

    def widths(self) -> dict[str, int]:
        return dict.fromkeys(("x", "y"), self.outer * self.n)


@step_type
class Reduce(Lines, frozen=True, kw_only=True, tag="reduce"):
    """x [outer, n, inner] -> y [outer, inner]; argmax gives i32."""

    y: Operand
    inner: int = 1
    reduction: Literal["sum", "mean", "amax", "amin", "prod", "argmax"]

    def widths(self) -> dict[str, int]:
        return {"x": self.outer * self.n * self.inner, "y": self.outer * self.inner}


@step_type
class Softmax(Lines, frozen=True, kw_only=True, tag="softmax"):
    """y = softmax(x) over lines."""

    y: Operand


@step_type
class Cumsum(Lines, frozen=True, kw_only=True, tag="cumsum"):
    """y = running sum of x along lines."""

    y: Operand


@step_type
class Hadamard(Lines, frozen=True, kw_only=True, tag="hadamard"):
    """y = the Walsh-Hadamard transform of each line of x, orthonormal; n is a power of two."""

    y: Operand

    def problem(self) -> str:
        fits = MIN_BLOCK <= self.n <= MAX_BLOCK and self.n & (self.n - 1) == 0
        return "" if fits else f"n = {self.n} is no power of two from {MIN_BLOCK} to {MAX_BLOCK}"


@step_type
class Topk(Lines, frozen=True, kw_only=True, tag="topk"):
    """The k largest (or smallest) of each line in order, and their indices; ties go to the lower index."""

    OUTPUTS: ClassVar = ("values", "indices")
    DTYPES: ClassVar = {"x": VALUES, "values": VALUES, "indices": _INDEX}
    values: Operand
    indices: Operand
    k: int
    largest: bool = True

    def widths(self) -> dict[str, int]:
        return {"x": self.outer * self.n, **dict.fromkeys(("values", "indices"), self.outer * self.k)}

    def problem(self) -> str:
        return f"k = {self.k} exceeds n = {self.n}" if self.k > self.n else ""


@step_type
class Gather(Lines, frozen=True, kw_only=True, tag="gather"):
    """y [outer, m] = x[..., index[..., j]]; indices are clamped. one_index: all lines use the same index [m].

    experts: if it is not 0, line l uses index[expert[l]] of index [experts, m]. one_line: all lines read x [n].
    """

    DTYPES: ClassVar = {"x": VALUES, "index": _INDEX, "expert": _INDEX, "y": VALUES}
    index: Operand
    expert: Operand | None = None
    y: Operand
    m: int
    one_index: bool = False
    experts: int = 0
    one_line: bool = False

    def widths(self) -> dict[str, int]:
        indices = self.m if self.one_index else (self.experts or self.outer) * self.m
        x = self.n if self.one_line else self.outer * self.n
        return {"x": x, "index": indices, "expert": self.outer, "y": self.outer * self.m}

    def problem(self) -> str:
        return "" if (self.expert is None) == (self.experts == 0) else "an expert per line and their number go together"


@step_type
class Scatter(Lines, frozen=True, kw_only=True, tag="scatter"):
    """y = x with elements at index [outer, m] set to, or increased by, those of src [outer, m], or `value` if src is
    None.

    value: a text if JSON has no such number ("inf", "-inf", "nan").
    """

    DTYPES: ClassVar = {"x": VALUES, "index": _INDEX, "src": VALUES, "y": VALUES}
    index: Operand
    src: Operand | None = None
    y: Operand
    m: int
    reduce: Literal["none", "add"] = "none"
    value: float | str = 0.0

    def widths(self) -> dict[str, int]:
        return {**super().widths(), **dict.fromkeys(("index", "src"), self.outer * self.m)}


@step_type
class Bmm(Step, frozen=True, kw_only=True, tag="bmm"):
    """c [batch, m, n] = a [batch, m, k] b [batch, k, n], or b [batch, n, k] if transposed; b may be a weight."""

    OUTPUTS: ClassVar = ("c",)
    a: Operand
    b: Operand
    c: Operand
    batch: int
    m: int
    k: int
    n: int
    b_transposed: bool = False

    def widths(self) -> dict[str, int]:
        m, k, n = self.m, self.k, self.n
        return {"a": self.batch * m * k, "b": self.batch * k * n, "c": self.batch * m * n}

"""Top-k, indexed reads and writes along the last axis, and the choice of whole rows (embedding, wanted logit rows)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from .....runtime.format.manifest import Limits
from .....runtime.format.plan import Extent, extent
from ....targets import Target
from ...errors import CodegenError
from ...render import render
from ..layouts.affine import codes_nbytes
from ..spec import ONE, Arg, LaunchSpec, Shape, TritonKernel, batch_arg
from ..tiling.choice import Tuner
from .lines import BLOCK, Lines, even_block, power_of_two, warps

QUANT_BITS = {"gq4": 4, "gq8": 8}
WARP = 32
UNROLLED = 16  # indices of a line whose loads a scatter issues at once


@dataclass(frozen=True, kw_only=True)
class Topk(Lines):
    """x [rows, outer, n] -> values and indices [rows, outer, k] in order; ties go to the lower index."""

    template: ClassVar[str] = "triton/topk.py.jinja"
    entry: ClassVar[str] = "topk"
    names: ClassVar[tuple[str, ...]] = ("x_ptr", "values_ptr", "indices_ptr")
    max_width: ClassVar[int] = 16384
    k: int
    largest: bool = True
    values_stride: int
    indices_stride: int

    def __post_init__(self) -> None:
        if self.n > self.max_width:
            raise CodegenError(f"topk over {self.n} elements: the Triton backend holds at most {self.max_width}")

    @property
    def block(self) -> int:
        """One line, so that a warp of its own can reduce it in every round without a barrier."""
        return max(WARP // self.width, 1)

    def warps(self, target: Target) -> int:
        return warps(self.width, target, 16)

    @property
    def kept(self) -> int:
        """Width of the block that collects the result."""
        return power_of_two(self.k)


@dataclass(frozen=True, kw_only=True)
class Gather(Lines):
    """y [rows, outer, m] = x[..., index[..., j]] of x [rows, outer, n]; indices are clamped."""

    template: ClassVar[str] = "triton/gather.py.jinja"
    entry: ClassVar[str] = "gather"
    inputs: ClassVar[int] = 2
    names: ClassVar[tuple[str, ...]] = ("x_ptr", "index_ptr", "y_ptr")
    m: int
    index_stride: int

    @property
    def width(self) -> int:
        return min(power_of_two(self.m), self.max_width)

    @property
    def chunks(self) -> int:
        return -(-self.m // self.width)


@dataclass(frozen=True, kw_only=True)
class Scatter(Lines):
    """y = x [rows, outer, n] with elements at index [rows, outer, m] set or added to; indices outside are skipped.

    reduce: "none" (the last of equal indices stays) or "add". src: "tensor" or "value". The order of additions is that
    of the indices, so results do not vary.
    """

    template: ClassVar[str] = "triton/scatter.py.jinja"
    entry: ClassVar[str] = "scatter"
    inputs: ClassVar[int] = 3
    names: ClassVar[tuple[str, ...]] = ("x_ptr", "index_ptr", "src_ptr", "y_ptr")
    m: int
    reduce: str = "none"
    src: str = "tensor"
    value: float | str = 0.0
    index_stride: int
    src_stride: int = 0

    @property
    def chunks(self) -> int:
        return -(-self.n // self.width)

    @property
    def unrolled(self) -> bool:
        """Whether the loop over indices is unrolled."""
        return self.m <= UNROLLED

    @property
    def value_text(self) -> str:
        """The value as a Triton expression."""
        value = float(self.value)
        if self.whole:
            return str(int(value))
        return repr(value) if math.isfinite(value) else f'float("{value}")'


@dataclass(frozen=True, kw_only=True)
class TakeRows(TritonKernel):
    """y [R, n] = source[ids]; ids are clamped to the rows that there are."""

    template: ClassVar[str] = "triton/take_rows.py.jinja"
    n: int
    y_stride: int

    @property
    def entry(self) -> str:
        raise NotImplementedError

    @property
    def row_stride(self) -> int:
        """Elements between rows of the source."""
        return self.n

    @property
    def last(self) -> str:
        """Number of the source's last row."""
        raise NotImplementedError

    @property
    def args(self) -> tuple[Arg, ...]:
        """ids_ptr, x_ptr, y_ptr, num_rows and what `last` needs."""
        raise NotImplementedError

    @property
    def signature(self) -> str:
        """The parameters of the rendered function."""
        return ", ".join(arg.name for arg in self.args)

    @property
    def cols(self) -> int:
        """Columns per program."""
        return even_block(self.n)

    @property
    def row_block(self) -> int:
        """Rows per program."""
        return BLOCK // self.cols

    def launches(self, shape: Shape, limits: Limits, tuner: Tuner) -> tuple[LaunchSpec, ...]:
        rows = next(arg.value for arg in self.args if arg.name == "num_rows")
        grid = (extent(rows, self.row_block), Extent(-(-self.n // self.cols)), ONE)
        return (
            LaunchSpec(render(self.template, self), self.entry, self.args, grid, num_warps=warps(BLOCK, tuner.target)),
        )


@dataclass(frozen=True, kw_only=True)
class Embedding(TakeRows):
    """Operands: ids int32, table [table_rows, n] row-major or quantized, as the product has it that shares it -> y."""

    inputs: ClassVar[int] = 2
    table_rows: int
    format: str
    group: int = 0

    @property
    def template(self) -> str:  # type: ignore[override]
        return "triton/take_codes.py.jinja" if self.bits else "triton/take_rows.py.jinja"

    @property
    def bits(self) -> int:
        """Of a code; 0 where there are none."""
        return QUANT_BITS.get(self.format, 0)

    @property
    def span(self) -> int:
        """Elements of 16 bits that hold the codes of one row's group."""
        return self.group * self.bits // 16

    @property
    def codes_nbytes(self) -> int:
        """Where the scales begin."""
        return codes_nbytes(self.table_rows, self.n, self.bits)

    @property
    def entry(self) -> str:
        return "embedding"

    @property
    def last(self) -> str:
        return str(self.table_rows - 1)

    @property
    def args(self) -> tuple[Arg, ...]:
        if not self.bits and self.format not in ("f32", "bf16", "f16"):
            raise CodegenError(f"embedding: the Triton backend reads no table of format {self.format!r}")
        num_rows = Arg("num_rows", "i32", self.num_rows, aligned=False)
        return (*self.pointers("ids_ptr", "x_ptr", "y_ptr"), num_rows)


@dataclass(frozen=True, kw_only=True)
class SelectRows(TakeRows):
    """Operands: x, one row per token -> y, one row per wanted logit row."""

    inputs: ClassVar[int] = 1
    x_stride: int
    dtype: str = "f32"

    @property
    def entry(self) -> str:
        return "select_rows"

    @property
    def row_stride(self) -> int:
        return self.x_stride

    @property
    def last(self) -> str:
        return "num_tokens - 1"

    @property
    def args(self) -> tuple[Arg, ...]:
        sizes = [Arg(n, "i32", v, aligned=False) for n, v in (("num_rows", "num_logit_rows"), ("num_tokens",) * 2)]
        ids = batch_arg("logit_rows")
        return (Arg("ids_ptr", ids.type, ids.value, ids.aligned), *self.pointers("x_ptr", "y_ptr"), *sizes)


INDEXED: dict[str, type[TritonKernel]] = {
    "topk": Topk, "gather": Gather, "scatter": Scatter, "embedding": Embedding, "select_rows": SelectRows,
}  # fmt: skip

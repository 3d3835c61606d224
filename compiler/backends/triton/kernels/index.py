"""Top-k, indexed reads and writes along the last axis, and the choice of whole rows (embedding, wanted logit rows)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar

from .....runtime.format.manifest import Limits
from .....runtime.format.plan import Extent, SizeArg, extent
from ....program.layout import Layout
from ....program.steps import rowwise as steps
from ....program.steps.embedding import Embedding, SelectRows
from ....targets import Target
from ...render import render
from ..layouts.codes import CodeGroups
from ..layouts.registry import LAYOUTS
from ..spec import ONE, Arg, LaunchSpec, Shape, StepKernel, batch_arg
from ..tiling.choice import Tuner, power_of_two
from .lines import BLOCK, LinesKernel, even_block, warps

WARP = 32
UNROLLED = 16  # indices of a line whose loads a scatter issues at once
R = TypeVar("R", Embedding, SelectRows)


@dataclass(frozen=True)
class TopkKernel(LinesKernel[steps.Topk]):
    """x [rows, outer, n] -> values and indices [rows, outer, k] in order; ties go to the lower index."""

    template: ClassVar[str] = "triton/topk.py.jinja"
    entry: ClassVar[str] = "topk"
    max_width: ClassVar[int] = 16384

    @classmethod
    def refusal(cls, step: steps.Topk) -> str:
        if step.n > cls.max_width:
            return f"topk over {step.n} elements: the Triton backend holds at most {cls.max_width}"
        return super().refusal(step)

    @property
    def block(self) -> int:
        """Lines of a program: one, so that a single warp can reduce it in every round without a barrier."""
        return max(WARP // self.width, 1)

    def warps(self, target: Target) -> int:
        return warps(self.width, target, 16)

    @property
    def kept(self) -> int:
        """Width of the block that collects the result."""
        return power_of_two(self.step.k)


@dataclass(frozen=True)
class GatherKernel(LinesKernel[steps.Gather]):
    """y [rows, outer, m] = x[..., index[..., j]] of x [rows, outer, n]; indices are clamped."""

    template: ClassVar[str] = "triton/gather.py.jinja"
    entry: ClassVar[str] = "gather"

    @property
    def width(self) -> int:
        return min(power_of_two(self.step.m), self.max_width)

    @property
    def chunks(self) -> int:
        return -(-self.step.m // self.width)


@dataclass(frozen=True)
class ScatterKernel(LinesKernel[steps.Scatter]):
    """y = x [rows, outer, n] with elements at index [rows, outer, m] set or added to; indices outside are skipped.

    If equal indices are set, the last one wins. Additions are made in the order of the indices, so results do not vary.
    """

    template: ClassVar[str] = "triton/scatter.py.jinja"
    entry: ClassVar[str] = "scatter"

    @property
    def chunks(self) -> int:
        return -(-self.step.n // self.width)

    @property
    def unrolled(self) -> bool:
        """Whether the loop over indices is unrolled."""
        return self.step.m <= UNROLLED

    @property
    def value_text(self) -> str:
        """The value as a Triton expression."""
        value = float(self.step.value)
        if self.whole:
            return str(int(value))
        return repr(value) if math.isfinite(value) else f'float("{value}")'


@dataclass(frozen=True)
class TakeRowsKernel(StepKernel[R]):
    """y [R, n] = source[ids]; ids are clamped to the rows of the source."""

    template: ClassVar[str] = "triton/take_rows.py.jinja"

    @property
    def entry(self) -> str:
        """The name of the rendered function; subclasses give it."""
        raise NotImplementedError

    @property
    def row_stride(self) -> int:
        """Elements between rows of the source."""
        return self.step.n

    @property
    def converts(self) -> bool:
        """Whether y has another type than the source."""
        raise NotImplementedError

    @property
    def last(self) -> str:
        """Number of the source's last row."""
        raise NotImplementedError

    @property
    def args(self) -> tuple[Arg, ...]:
        """The arguments: ids_ptr, x_ptr, y_ptr, num_rows and those that `last` needs."""
        raise NotImplementedError

    @property
    def signature(self) -> str:
        """The parameters of the rendered function."""
        return ", ".join(arg.name for arg in self.args)

    @property
    def cols(self) -> int:
        """Columns per program."""
        return even_block(self.step.n)

    @property
    def row_block(self) -> int:
        """Rows per program."""
        return BLOCK // self.cols

    def launches(self, shape: Shape, limits: Limits, tuner: Tuner) -> tuple[LaunchSpec, ...]:
        grid = (extent(self.num_rows, self.row_block), Extent(-(-self.step.n // self.cols)), ONE)
        source = render(self.template, self, self.step)
        return (LaunchSpec(source, self.entry, self.args, grid, num_warps=warps(BLOCK, tuner.target)),)


@dataclass(frozen=True)
class EmbeddingKernel(TakeRowsKernel[Embedding]):
    """Rows of a table [table_rows, n], row-major or quantized, in the layout of the product that shares it."""

    @classmethod
    def refusal(cls, step: Embedding) -> str:
        return LAYOUTS.refusal(step.stored, Layout) or super().refusal(step)

    @property
    def layout(self) -> Layout:
        """The layout of the table."""
        return LAYOUTS.of(self.step.stored)

    @property
    def template(self) -> str:  # type: ignore[override]
        return "triton/take_codes.py.jinja" if self.layout.coded else "triton/take_rows.py.jinja"

    @property
    def macros(self) -> str:
        """The template that says how codes are read."""
        assert isinstance(self.layout, CodeGroups)
        return self.layout.macros

    @property
    def entry(self) -> str:
        return "embedding"

    @property
    def last(self) -> str:
        return str(self.step.table_rows - 1)

    @property
    def args(self) -> tuple[Arg, ...]:
        return (*self.pointers(ids="ids_ptr", table="x_ptr", y="y_ptr"), self.count)

    @property
    def converts(self) -> bool:
        return self.step.y.dtype != self.step.table.dtype


@dataclass(frozen=True)
class SelectRowsKernel(TakeRowsKernel[SelectRows]):
    """One row of x, which has a row per token, for each logit row that is wanted."""

    @property
    def entry(self) -> str:
        return "select_rows"

    @property
    def row_stride(self) -> int:
        return self.step.x.stride

    @property
    def last(self) -> str:
        return "num_tokens - 1"

    @property
    def args(self) -> tuple[Arg, ...]:
        ids = replace(batch_arg("logit_rows"), name="ids_ptr")
        tokens = Arg("num_tokens", "i32", SizeArg("num_tokens"), aligned=False)
        return (ids, *self.pointers(x="x_ptr", y="y_ptr"), self.count, tokens)

    @property
    def converts(self) -> bool:
        return self.step.y.dtype != self.step.x.dtype

"""A product with a weight: the properties of its step that its launches and their sources use.

This module does not depend on how a product is tiled."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from .....runtime.format.operands import Operand
from .....runtime.format.plan import Extent, extent
from ....program.layout import Layout
from ....program.steps import linear as steps
from ....program.steps.base import QuantizedRows
from ..layouts.codes import CodeGroups
from ..layouts.registry import LAYOUTS
from ..spec import Arg, StepKernel
from ..tiling.machine import LinearTiling
from ..tiling.modes.table import many_mode_of, mode_of
from ..tiling.product import ProductMode
from .norm import NormKernel

P = TypeVar("P", bound=steps.Product)
TEMPLATES = "triton/linear"  # the folder of a product's templates, and of the kernels before it


@dataclass(frozen=True)
class WeightProduct(StepKernel[P]):
    """y = finish(x W^T + bias): the facts of the step, and the reasons to refuse it.

    ahead: whether kernels for few rows have a function that prefetches the first weights of a program; a step kernel
    calls it before it waits for x.
    """

    ahead: bool = False

    @classmethod
    def refusal(cls, step: P) -> str:
        if reason := LAYOUTS.refusal(step.stored, Layout):
            return reason
        normed = step.normed if isinstance(step, steps.RowProduct) else None
        if normed and (reason := NormKernel.refusal(normed)):
            return reason
        layout = LAYOUTS.of(step.stored)
        if isinstance(layout, CodeGroups) and (reason := layout.misfit(step.n, step.k)):
            return f"product: {reason}"
        for part in step.epilogue.inputs if step.epilogue else ():
            if isinstance(part, steps.Columns) and not 0 <= part.offset <= step.n - 1 - part.stride * (
                step.columns - 1
            ):
                return f"product epilogue: {part} of {step.columns} columns lies outside n = {step.n}"
        return super().refusal(step)

    @property
    def x(self) -> Operand:
        """The rows that are multiplied, as values of 16 or 32 bits."""
        assert not isinstance(self.step.x, QuantizedRows)
        return self.step.x

    @property
    def experts(self) -> int:
        """Number of matrices that rows are sent to; 0 if all rows share one."""
        return 0

    @property
    def topk(self) -> int:
        """Matrices per row."""
        return 1

    @property
    def x_per_slot(self) -> bool:
        """Whether each of a row's products has its own x."""
        return False

    @cached_property
    def layout(self) -> Layout:
        """The layout of W."""
        return LAYOUTS.of(self.step.stored)

    @property
    def coded(self) -> bool:
        """Whether rows also come in 8 bits."""
        return isinstance(self.step, steps.RowProduct) and self.step.x_coded is not None

    @property
    def codes(self) -> CodeGroups | None:
        """The layout of W; None if W has no codes."""
        return self.layout if isinstance(self.layout, CodeGroups) else None

    def mode(self, level: int) -> ProductMode:
        """How operands are multiplied on a GPU of that compute capability, 0 for HIP."""
        return mode_of(self.codes, self.x.dtype, self.step.w.dtype, level, bool(self.experts))

    def many_mode(self, level: int) -> ProductMode | None:
        """How operands may be multiplied there by tilings with LinearTiling.eight; None if there is no other way."""
        return many_mode_of(self.codes, level, bool(self.experts))

    def tiled_mode(self, level: int, tile: LinearTiling) -> ProductMode:
        """How operands are multiplied there by a tiling."""
        many = self.many_mode(level) if tile.eight else None
        return many or self.mode(level)

    @cached_property
    def norm(self) -> NormKernel | None:
        """The norm of y that the step ends with; None if it ends with none."""
        normed = self.step.normed if isinstance(self.step, steps.RowProduct) else None
        return NormKernel(normed) if normed else None

    @property
    def operand_args(self) -> dict[str, Arg]:
        """An argument for each operand of the step but the norm's, by their names in the source, such as "x_ptr"."""
        extras = {f"extras.{i}": f"e{i}_ptr" for i in range(len(self.step.extras))}
        number = len(self.step.low) if isinstance(self.step, steps.RowProduct) else 0
        change = {f"{name}.{i}": f"{name}{i}_ptr" for i in range(number) for name in ("low", "up", "shift")}
        names = {**extras, **change, "slot": "slot_ptr"}
        args = self.pointers(x="x_ptr", w="w_ptr", bias="b_ptr", index="index_ptr", **names, y="y_ptr")
        return {arg.name: arg for arg in args}

    @property
    def slots(self) -> Extent:
        """The number of products of a row with a matrix."""
        return extent(self.num_rows, times=self.topk)

    def blocks(self, block: int) -> Extent:
        """The most blocks of one expert's rows; see `most_blocks`."""
        return extent(self.num_rows, block, self.topk, self.experts + 1)

    def most_blocks(self, block: int, rows: str) -> str:
        """The most blocks of one expert's rows, as an expression: full blocks of all slots, and one partial block per
        expert. rows: the name of the number of rows."""
        return f"(({rows} + {block - 1}) // {block} * {self.topk} + {self.experts + 1})"

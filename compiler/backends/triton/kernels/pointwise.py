"""Generated elementwise kernels: any body over operands that broadcast to one shape per row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from .....runtime.format.manifest import Limits
from .....runtime.format.plan import Extent, extent
from ....program.steps import pointwise as steps
from ....program.strides import Access
from ...render import render
from ..spec import LaunchSpec, Shape, StepKernel
from ..tiling.choice import Tuner
from .body import TritonValue, translate
from .lines import BLOCK, even_block, warps

KINDS = {"f32": "f", "bf16": "f", "f16": "f", "i32": "i", "bool": "b"}


@dataclass(frozen=True)
class AccessPlace:
    """An operand in the rendered source: pointer, address and mask expressions, and the variable that is read into or
    written."""

    pointer: str
    address: str
    mask: str
    value: str


@dataclass(frozen=True)
class PointwiseKernel(StepKernel[steps.Pointwise]):
    """y = body(args) over the shape per row, in blocks of rows and columns."""

    template: ClassVar[str] = "triton/pointwise.py.jinja"
    entry: ClassVar[str] = "pointwise"

    @classmethod
    def refusal(cls, step: steps.Pointwise) -> str:
        unknown = [access.dtype for access in step.accesses if access.dtype not in KINDS]
        if unknown:
            return f"no code for operands of type {unknown[0]!r}"
        return super().refusal(step)

    @cached_property
    def _walk(self) -> tuple[tuple[int, ...], tuple[Access, ...]]:
        return self.step.normal_form()

    @property
    def shape(self) -> tuple[int, ...]:
        """The dims per row, merged as far as the operands allow; () for one element."""
        return self._walk[0]

    @property
    def accesses(self) -> tuple[Access, ...]:
        """All operands, inputs first."""
        return self._walk[1]

    @property
    def inputs(self) -> tuple[Access, ...]:
        """The operands that are read."""
        return self.accesses[:-1]

    @property
    def output(self) -> Access:
        """The operand that is written."""
        return self.accesses[-1]

    @property
    def dims(self) -> tuple[int, ...]:
        """`shape`, or (1,) if a row has one element."""
        return self.shape or (1,)

    @property
    def cols(self) -> int:
        """Elements of a row."""
        return math.prod(self.dims)

    @property
    def block_cols(self) -> int:
        """Columns per program."""
        return even_block(self.cols)

    @property
    def block_rows(self) -> int:
        """Rows per program."""
        return BLOCK // self.block_cols

    @property
    def partial(self) -> bool:
        """Whether a program's columns may lie outside the row."""
        return self.cols % self.block_cols != 0

    @property
    def names(self) -> list[str]:
        """The names of the pointers."""
        return [*(f"a{i}_ptr" for i in range(len(self.inputs))), "y0_ptr"]

    @cached_property
    def _translated(self) -> tuple[list[str], TritonValue]:
        return translate(self.step.body, [TritonValue(f"a{i}", KINDS[a.dtype]) for i, a in enumerate(self.inputs)])

    @property
    def lines(self) -> list[str]:
        """The source lines of the body."""
        return self._translated[0]

    @property
    def read(self) -> list[AccessPlace]:
        """The operands that are loaded, each into the variable a<i>."""
        convert = {"f": ".to(tl.float32)", "i": "", "b": " != 0"}
        return [self._place(i, convert[KINDS[access.dtype]]) for i, access in enumerate(self.inputs)]

    @property
    def written(self) -> AccessPlace:
        """The operand that is stored."""
        value, kind = self._translated[1], KINDS[self.output.dtype]
        return self._place(len(self.inputs), value.mask if kind == "b" else value.to(kind).text)

    def _place(self, i: int, value: str) -> AccessPlace:
        access = self.accesses[i]
        pointer, offset = self.names[i], column_offset(self.shape, access.strides)
        by_row = i >= len(self.inputs) or access.row_stride != 0
        rows = f" + row * {access.row_stride}" if by_row else ""
        if (
            not rows and not offset
        ):  # a block although it has one element: Triton's interpreter broadcasts scalar comparisons to floats
            offset = "tl.zeros([1, 1], tl.int32)"
            return AccessPlace(pointer, f"{pointer} + {offset}", "", value)
        masks = ["in_rows"] * (by_row and self.block_rows > 1) + ["in_cols"] * (bool(offset) and self.partial)
        mask = f", mask={' & '.join(masks)}" if masks else ""
        return AccessPlace(pointer, f"{pointer}{rows}{' + ' if offset else ''}{offset}", mask, value)

    def launches(self, shape: Shape, limits: Limits, tuner: Tuner) -> tuple[LaunchSpec, ...]:
        args = self.pointers(**dict(zip(self.step.operands, self.names, strict=True)))
        grid = (extent(self.num_rows, self.block_rows), Extent(-(-self.cols // self.block_cols)), Extent(1))
        source = render(self.template, self, self.step)
        return (LaunchSpec(source, self.entry, (*args, self.count), grid, num_warps=warps(BLOCK, tuner.target)),)


def column_offset(dims: Sequence[int], strides: Sequence[int]) -> str:
    """The offset of column `at` (of all merged dims) in an operand; "" if the operand is the same in all columns."""
    terms: list[str] = []
    below = 1
    for d in range(len(dims) - 1, -1, -1):
        if strides[d]:
            index = f"at // {below}" if below > 1 else "at"
            index += f" % {dims[d]}" if d else ""
            terms.append(index + (f" * {strides[d]}" if strides[d] != 1 else ""))
        below *= dims[d]
    return " + ".join(reversed(terms))

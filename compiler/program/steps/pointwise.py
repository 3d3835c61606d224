"""Generated elementwise kernels."""

from __future__ import annotations

from typing import ClassVar

from ....runtime.format.operands import Operand
from ...ops.body import Body
from ..strides import Access, normalize
from .base import VALUES, Step, step_type


@step_type
class Pointwise(Step, frozen=True, kw_only=True, tag="pointwise"):
    """y = body(args) over `shape` per row.

    walks: strides of each operand over the shape, in elements, y last; 0 for a broadcast dim.
    """

    DTYPES: ClassVar = {"args": VALUES, "y": VALUES}
    args: tuple[Operand, ...]
    y: Operand
    body: Body
    shape: tuple[int, ...]
    walks: tuple[tuple[int, ...], ...]

    def widths(self) -> dict[str, int]:
        names = (*(f"args.{i}" for i in range(len(self.args))), "y")
        return {name: self._extent(walk) for name, walk in zip(names, self.walks, strict=True)}

    def _extent(self, walk: tuple[int, ...]) -> int:
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, walk, strict=False))  # see normal_form

    @property
    def accesses(self) -> tuple[Access, ...]:
        """How each operand is walked, y last."""
        pairs = zip((*self.args, self.y), self.walks, strict=True)
        return tuple(Access(operand.dtype, operand.stride, strides) for operand, strides in pairs)

    def problem(self) -> str:
        try:
            self.normal_form()
        except ValueError as error:
            return str(error)
        return ""

    def normal_form(self) -> tuple[tuple[int, ...], tuple[Access, ...]]:
        """Shape and accesses in the form that back ends walk; ValueError for operands that do not fit the shape or the
        body."""
        if self.body.num_arguments > len(self.args):
            raise ValueError(f"the body reads a{self.body.num_arguments - 1} of {len(self.args)} inputs")
        return normalize(self.shape, self.accesses)

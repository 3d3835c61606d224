"""The base of kernels over one axis of each row: which lines of which rows a program processes.

A line is the n elements that are reduced, sorted or indexed; a row holds `lines` of them. A program processes a power
of two of lines, of one row, or of several rows if a row has few, so that its block has about `BLOCK` elements.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeVar

from .....runtime.format.manifest import Limits
from .....runtime.format.plan import Extent, extent
from ....program.steps import rowwise as steps
from ....targets import Target
from ...render import render
from ..spec import Arg, LaunchSpec, Shape, StepKernel
from ..tiling.choice import Tuner, power_of_two

L = TypeVar("L", bound=steps.Lines)

BLOCK = 1024  # elements per program
PER_THREAD = 8  # elements: one 16-byte access of 16-bit elements
MAX_THREADS = 512


def warps(elements: int, target: Target, per_thread: int = PER_THREAD) -> int:
    """Warps of a program that holds `elements` elements, a power of two."""
    threads = min(elements // per_thread, MAX_THREADS)
    return max(threads // target.warp_size, 1)


def even_block(cols: int, largest: int = BLOCK) -> int:
    """Width of a block of columns: the widest power of two that leaves no rest, if that is wide enough."""
    whole = min(cols & -cols, largest)
    return whole if whole >= largest // 4 else min(power_of_two(cols), largest)


@dataclass(frozen=True)
class LinesKernel(StepKernel[L]):
    """x [rows, outer, n] -> y."""

    entry: ClassVar[str]
    max_width: ClassVar[int] = 1024

    @property
    def pointer_names(self) -> dict[str, str]:
        """The names of the operands in the source."""
        return {name: f"{name}_ptr" for name in self.step.operands}

    @property
    def lines(self) -> int:
        """Lines per row."""
        return self.step.outer

    @property
    def width(self) -> int:
        """Elements of a line that a program holds at a time."""
        return min(power_of_two(self.step.n), self.max_width)

    @property
    def chunks(self) -> int:
        """Programs that share a line."""
        return 1

    @property
    def block(self) -> int:
        """Lines per program."""
        return max(BLOCK // self.width, 1)

    @property
    def line_block(self) -> int:
        """Lines of one row per program."""
        return min(power_of_two(self.lines), self.block)

    @property
    def row_block(self) -> int:
        """Rows per program."""
        return self.block // self.line_block

    @property
    def looped(self) -> bool:
        """Whether a line is wider than the block of a program."""
        return self.step.n > self.width

    @property
    def whole(self) -> bool:
        """Whether x is integer."""
        return self.step.x.dtype == "i32"

    @property
    def widen(self) -> str:
        """The conversion behind a load of x."""
        return "" if self.whole else ".to(tl.float32)"

    def warps(self, target: Target) -> int:
        """Warps per program."""
        return warps(self.block * self.width, target)

    @property
    def args(self) -> tuple[Arg, ...]:
        """All pointers, and the number of rows."""
        return (*self.pointers(**self.pointer_names), self.count)

    @property
    def signature(self) -> str:
        """The parameters of the rendered function."""
        return ", ".join(arg.name for arg in self.args)

    def launches(self, shape: Shape, limits: Limits, tuner: Tuner) -> tuple[LaunchSpec, ...]:
        blocks = -(-self.lines // self.line_block)
        grid = (extent(self.num_rows, self.row_block), Extent(blocks), Extent(self.chunks))
        return (
            LaunchSpec(
                render(self.template, self, self.step), self.entry, self.args, grid, num_warps=self.warps(tuner.target)
            ),
        )

"""RMS and layer norm, with or without the residual addition before them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .....runtime.format.manifest import Limits
from .....runtime.format.plan import Extent, extent
from ....program.coded_rows import MICRO_STEP, micro_words
from ....program.steps import norm as steps
from ...render import render
from ..spec import ONE, LaunchSpec, Shape, StepKernel
from ..tiling.choice import Tuner


@dataclass(frozen=True)
class NormKernel(StepKernel[steps.Norm]):
    """y = norm(x) or norm(x + r) over groups of `d` elements."""

    template: ClassVar[str] = "triton/norm.py.jinja"
    entry: ClassVar[str] = "norm"

    @property
    def adds(self) -> bool:
        """Whether x and r are summed first."""
        return isinstance(self.step, steps.AddRmsNorm | steps.AddLayerNorm)

    @property
    def centered(self) -> bool:
        """Whether the mean is subtracted."""
        return isinstance(self.step, steps.LayerNorm | steps.AddLayerNorm)

    @property
    def has_bias(self) -> bool:
        """Whether a bias is added after the multiplication by the norm's weight."""
        return "bias" in self.step.operands

    @property
    def words(self) -> int:
        """Words that hold a row's powers of two: four to a word, one per 32 values."""
        return micro_words(self.step.d)

    @property
    def block(self) -> int:
        """The width that one program holds: the next power of two; for MXFP8 one that fills whole words of powers."""
        return max(1 << max(self.step.d - 1, 1).bit_length(), MICRO_STEP * (self.step.coding == "mxfp8"))

    def launches(self, shape: Shape, limits: Limits, tuner: Tuner) -> tuple[LaunchSpec, ...]:
        args = self.pointers(x="x_ptr", r="r_ptr", w="w_ptr", bias="b_ptr", y="y_ptr", sum="sum_ptr")
        args += self.pointers(**{"coded.codes": "codes_ptr", "coded.scales": "scales_ptr"})
        grid = (extent(self.num_rows), Extent(self.step.groups), ONE)
        warps = min(max(self.block // 512, 1), 16)
        return (LaunchSpec(render(self.template, self, self.step), self.entry, args, grid, num_warps=warps),)

"""RMS and layer norm, with or without the residual addition before them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .....runtime.format.manifest import Limits
from .....runtime.format.plan import Extent, extent
from ...render import render
from ..spec import ONE, LaunchSpec, Shape, TritonKernel
from ..tiling.choice import Tuner


@dataclass(frozen=True, kw_only=True)
class Norm(TritonKernel):
    """y = norm(x) or norm(x + r) over groups of `d` elements; operands x[, r], weight[, bias] -> y[, sum]."""

    template: ClassVar[str] = "triton/norm.py.jinja"
    entry: ClassVar[str] = "norm"
    adds: ClassVar[bool] = False
    centered: ClassVar[bool] = False
    d: int
    groups: int
    eps: float
    x_stride: int
    y_stride: int
    has_weight: bool
    has_bias: bool = False
    r_stride: int = 0
    sum_stride: int = 0

    @property
    def inputs(self) -> int:  # type: ignore[override]
        return 2 + self.adds + self.centered

    @property
    def block(self) -> int:
        """The width that one program holds: the next power of two."""
        return 1 << max(self.d - 1, 1).bit_length()

    def launches(self, shape: Shape, limits: Limits, tuner: Tuner) -> tuple[LaunchSpec, ...]:
        names = ["x_ptr", *(["r_ptr"] if self.adds else []), "w_ptr", *(["b_ptr"] if self.centered else []), "y_ptr"]
        args = self.pointers(*names, *(["sum_ptr"] if self.adds else []))
        grid = (extent(self.num_rows), Extent(self.groups), ONE)
        warps = min(max(self.block // 512, 1), 16)
        return (LaunchSpec(render(self.template, self), self.entry, args, grid, num_warps=warps),)


class AddRmsNorm(Norm):
    """RMS norm of a sum."""

    adds = True


class LayerNorm(Norm):
    """Layer norm."""

    centered = True


class AddLayerNorm(Norm):
    """Layer norm of a sum."""

    adds = True
    centered = True


NORMS: dict[str, type[TritonKernel]] = {
    "rms_norm": Norm, "add_rms_norm": AddRmsNorm, "layer_norm": LayerNorm, "add_layer_norm": AddLayerNorm,
}  # fmt: skip

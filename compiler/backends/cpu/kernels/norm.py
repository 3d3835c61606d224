"""Norms, with or without the residual addition before them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ....program.steps.norm import AddLayerNorm, AddRmsNorm, LayerNorm, Norm, RmsNorm
from .base import KernelParams


@dataclass(frozen=True)
class NormParams(KernelParams[Norm]):
    """Parameters that all norms share."""

    @property
    def add(self) -> bool:
        """Whether x and r are summed first."""
        return isinstance(self.step, AddRmsNorm | AddLayerNorm)

    @property
    def eps_text(self) -> str:
        """The term that is added to the mean square or variance, as a C++ float."""
        return f"{float(self.step.eps)!r}f"


@dataclass(frozen=True)
class RmsNormParams(NormParams):
    """rms_norm and add_rms_norm."""

    template: ClassVar[str] = "cpp/norm/rms_norm.cpp.jinja"


@dataclass(frozen=True)
class LayerNormParams(NormParams):
    """layer_norm and add_layer_norm."""

    template: ClassVar[str] = "cpp/norm/layer_norm.cpp.jinja"


NORMS: dict[type[Norm], type[NormParams]] = {
    RmsNorm: RmsNormParams, AddRmsNorm: RmsNormParams, LayerNorm: LayerNormParams, AddLayerNorm: LayerNormParams,
}  # fmt: skip

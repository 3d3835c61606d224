"""Kernels of layers with a recurrent state. See also `codegen_templates/cpp/state.h`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeVar

from ....program.steps.state import CausalConv, GatedScan, SelectiveScan, StateStep
from ..layouts.elements import round_up
from .base import KernelParams

TILE_BYTES = 16 << 10  # of a state that a thread has in its nearest cache

S = TypeVar("S", bound=StateStep)


@dataclass(frozen=True)
class StateParams(KernelParams[S]):
    """Common to all: they read and write float32 rows."""

    headers: ClassVar[tuple[str, ...]] = ("state.h",)

    @classmethod
    def refusal(cls, step: S) -> str:
        wrong = [name for name, operand in step.operands.items() if operand.dtype != "f32"]
        return f"operand {wrong[0]} must be float32" if wrong else super().refusal(step)


@dataclass(frozen=True)
class CausalConvParams(StateParams[CausalConv]):
    """Channels are independent of each other."""

    template: ClassVar[str] = "cpp/state/causal_conv.cpp.jinja"
    width: ClassVar[int] = 64


@dataclass(frozen=True)
class GatedScanParams(StateParams[GatedScan]):
    """Value columns are independent of each other."""

    template: ClassVar[str] = "cpp/state/gated_scan.cpp.jinja"

    @property
    def width(self) -> int:
        """Columns of a work item."""
        fitting = TILE_BYTES // (4 * self.step.key_dim) // 16 * 16
        return min(max(fitting, 16), round_up(self.step.value_dim, 16), 64)

    @property
    def scratch_bytes(self) -> int:
        rows = round_up(self.step.key_dim, 16)
        return round_up(4 * (4 * rows + self.step.key_dim * self.width), 64)


@dataclass(frozen=True)
class SelectiveScanParams(StateParams[SelectiveScan]):
    """Channels are independent of each other."""

    template: ClassVar[str] = "cpp/state/selective_scan.cpp.jinja"
    width: ClassVar[int] = 16

"""Kernels of layers with a recurrent state. See also `codegen_templates/cpp/state.h`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeVar

from ....program.steps.state import CausalConv, ChannelScan, GatedScan, SelectiveScan, StateStep
from ..layouts.elements import round_up
from .base import KernelParams

S = TypeVar("S", bound=StateStep)


@dataclass(frozen=True)
class StateParams(KernelParams[S]):
    """Parameters that all state kernels share: they read and write float32 rows."""

    headers: ClassVar[tuple[str, ...]] = ("state.h",)

    @classmethod
    def refusal(cls, step: S) -> str:
        wrong = [name for name, operand in step.operands.items() if operand.dtype != "f32"]
        return f"operand {wrong[0]} must be float32" if wrong else super().refusal(step)


@dataclass(frozen=True)
class CausalConvParams(StateParams[CausalConv]):
    """A causal convolution. Channels are independent of each other."""

    template: ClassVar[str] = "cpp/state/causal_conv.cpp.jinja"
    width: ClassVar[int] = 64


@dataclass(frozen=True)
class GatedScanParams(StateParams[GatedScan]):
    """A gated scan. Heads are independent of each other."""

    template: ClassVar[str] = "cpp/state/gated_scan.cpp.jinja"

    @property
    def scratch_bytes(self) -> int:
        s = self.step
        sides = s.chunk * (2 if s.delta else 1)
        floats = s.head_state + sides * (s.rows_padded + s.tile) + 2 * s.chunk * s.chunk
        return round_up(4 * floats, 64)


@dataclass(frozen=True)
class SelectiveScanParams(StateParams[SelectiveScan]):
    """A selective scan. Channels are independent of each other."""

    template: ClassVar[str] = "cpp/state/selective_scan.cpp.jinja"
    width: ClassVar[int] = 16


@dataclass(frozen=True)
class ChannelScanParams(StateParams[ChannelScan]):
    """A scan with a number per channel. Channels are independent of each other."""

    template: ClassVar[str] = "cpp/state/channel_scan.cpp.jinja"
    width: ClassVar[int] = 64

    @property
    def start(self) -> str:
        """C++ literal."""
        return f"{float(self.step.start)!r}f"

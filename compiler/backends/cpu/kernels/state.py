"""Kernels of layers with a recurrent state. See also `codegen_templates/cpp/state.h`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeVar

from ....program.steps.state import CausalConv, StateStep
from .base import KernelParams

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

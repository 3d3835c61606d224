"""Steps of layers with a recurrent state."""

from __future__ import annotations

from typing import ClassVar

from ....runtime.format.operands import Operand
from .base import Step, step_type


class StateStep(Step, frozen=True, kw_only=True):
    """A step that goes on from the state that its layer keeps of each sequence, in blocks of `block_size` tokens."""

    block_size: int

    @property
    def state(self) -> int:
        """Float32 elements of the state."""
        raise NotImplementedError


@step_type
class CausalConv(StateStep, frozen=True, kw_only=True, tag="causal_conv"):
    """y [channels] of x [channels] and those before it: see compiler/ops/convolution.py. w: [taps, channels].

    The state is the last taps - 1 inputs, [taps - 1, channels], the oldest first.
    """

    OUTPUTS: ClassVar = ("y",)
    x: Operand
    w: Operand
    bias: Operand | None = None
    y: Operand
    channels: int
    taps: int

    @property
    def state(self) -> int:
        return (self.taps - 1) * self.channels

    def widths(self) -> dict[str, int]:
        return {**dict.fromkeys(("x", "bias", "y"), self.channels), "w": self.taps * self.channels}

    def problem(self) -> str:
        return "" if self.taps > 1 else f"a convolution of {self.taps} taps has no state"

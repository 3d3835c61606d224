"""Kernels of layers with a recurrent state: a program goes through the tokens of one sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeVar

from .....runtime.format.kv import KVLayer
from .....runtime.format.manifest import Limits
from .....runtime.format.plan import Extent, KVArg, extent
from ....program.steps import state as steps
from ...render import render
from ..spec import ONE, Arg, LaunchSpec, Shape, StepKernel, batch_arg, size_arg
from ..tiling.choice import Tuner, power_of_two

S = TypeVar("S", bound=steps.StateStep)


@dataclass(frozen=True)
class StateKernel(StepKernel[S]):
    """The states of a layer, float32, begin `state_stride` elements after each other."""

    @property
    def state_stride(self) -> int:
        return KVLayer(state=self.step.state).block_bytes(self.step.block_size, "f32") // 4

    def state_args(self) -> tuple[Arg, ...]:
        """What triton/state.py.jinja reads."""
        arrays = map(batch_arg, ("positions", "slot_mapping", "seq_starts", "block_tables"))
        return (Arg("state_ptr", "*fp32", KVArg()), *arrays, size_arg("max_blocks"))


@dataclass(frozen=True)
class CausalConv(StateKernel[steps.CausalConv]):
    """A program takes a block of channels."""

    template: ClassVar[str] = "triton/causal_conv.py.jinja"
    entry: ClassVar[str] = "causal_conv"

    @property
    def block(self) -> int:
        """Channels of a program."""
        return min(power_of_two(self.step.channels), 128)

    def launches(self, shape: Shape, limits: Limits, tuner: Tuner) -> tuple[LaunchSpec, ...]:
        args = self.pointers(x="x_ptr", w="w_ptr", bias="b_ptr", y="y_ptr") + self.state_args()
        grid = (extent("num_seqs"), Extent(-(-self.step.channels // self.block)), ONE)
        return (LaunchSpec(render(self.template, self, self.step), self.entry, args, grid),)

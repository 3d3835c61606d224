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


@dataclass(frozen=True)
class GatedScan(StateKernel[steps.GatedScan]):
    """A program takes a block of value columns of one head."""

    template: ClassVar[str] = "triton/gated_scan.py.jinja"
    entry: ClassVar[str] = "gated_scan"

    @property
    def keys(self) -> int:
        return power_of_two(self.step.key_dim)

    @property
    def block(self) -> int:
        """Value columns of a program: as many as leave its part of the state in registers."""
        return min(power_of_two(self.step.value_dim), max(4096 // self.keys, 8))

    def launches(self, shape: Shape, limits: Limits, tuner: Tuner) -> tuple[LaunchSpec, ...]:
        operands = {name: f"{name}_ptr" for name in ("q", "k", "v", "decay", "beta", "o")}
        grid = (extent("num_seqs"), Extent(self.step.heads), Extent(-(-self.step.value_dim // self.block)))
        source = render(self.template, self, self.step)
        return (LaunchSpec(source, self.entry, self.pointers(**operands) + self.state_args(), grid),)


@dataclass(frozen=True)
class SelectiveScan(StateKernel[steps.SelectiveScan]):
    """A program takes a block of channels."""

    template: ClassVar[str] = "triton/selective_scan.py.jinja"
    entry: ClassVar[str] = "selective_scan"

    @property
    def states(self) -> int:
        return power_of_two(self.step.states)

    @property
    def block(self) -> int:
        """Channels of a program."""
        return min(power_of_two(self.step.channels), max(2048 // self.states, 8))

    def launches(self, shape: Shape, limits: Limits, tuner: Tuner) -> tuple[LaunchSpec, ...]:
        operands = {name: f"{name}_ptr" for name in ("x", "dt", "a", "b", "c", "y")}
        grid = (extent("num_seqs"), Extent(-(-self.step.channels // self.block)), ONE)
        source = render(self.template, self, self.step)
        return (LaunchSpec(source, self.entry, self.pointers(**operands) + self.state_args(), grid),)


@dataclass(frozen=True)
class ChannelScan(StateKernel[steps.ChannelScan]):
    """A program takes a block of channels."""

    template: ClassVar[str] = "triton/channel_scan.py.jinja"
    entry: ClassVar[str] = "channel_scan"

    @property
    def block(self) -> int:
        """Channels of a program."""
        return min(power_of_two(self.step.channels), 128)

    def launches(self, shape: Shape, limits: Limits, tuner: Tuner) -> tuple[LaunchSpec, ...]:
        args = self.pointers(x="x_ptr", decay="decay_ptr", y="y_ptr") + self.state_args()
        grid = (extent("num_seqs"), Extent(-(-self.step.channels // self.block)), ONE)
        return (LaunchSpec(render(self.template, self, self.step), self.entry, args, grid),)

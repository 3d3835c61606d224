"""Kernels of layers with a recurrent state: a program walks the tokens of one sequence, or chunks of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeVar

from .....runtime.format.kv import KVLayer
from .....runtime.format.kv_numbers import KV_NUMBERS
from .....runtime.format.manifest import Limits
from .....runtime.format.plan import Extent, KVArg, extent
from ....program.steps import state as steps
from ...render import render
from ..spec import ONE, Arg, LaunchSpec, Shape, StepKernel, batch_arg, scratch_arg, size_arg
from ..tiling.choice import Tuner, power_of_two

PART = 64  # rows of a state that a product reads at once
CHUNK = 16  # tokens of a prompt that are processed at once: as many as registers allow
MOST_KEYS = 256  # rows of a state for which prompts are processed in chunks
S = TypeVar("S", bound=steps.StateStep)


@dataclass(frozen=True)
class StateKernel(StepKernel[S]):
    """A kernel with the states of a layer, float32 or rounded to bf16, `state_stride` elements apart."""

    @property
    def rounded(self) -> bool:
        """Whether states are stored as bf16, not as float32."""
        return getattr(self.step, "rounded", False)

    @property
    def state_stride(self) -> int:
        """Elements from one state of the layer to the next."""
        nbytes = KVLayer(state=self.step.state).block_bytes(self.step.block_size, KV_NUMBERS["f32"])
        return nbytes // (2 if self.rounded else 4)

    def state_args(self) -> tuple[Arg, ...]:
        """The arguments that triton/state.py.jinja reads."""
        arrays = map(batch_arg, ("positions", "slot_mapping", "seq_starts", "block_tables"))
        return (Arg("state_ptr", "*bf16" if self.rounded else "*fp32", KVArg()), *arrays, size_arg("max_blocks"))


@dataclass(frozen=True)
class CausalConvKernel(StateKernel[steps.CausalConv]):
    """A causal convolution; a program computes a block of channels."""

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
class GatedScanKernel(StateKernel[steps.GatedScan]):
    """A gated scan; a program computes a block of value columns of one head."""

    template: ClassVar[str] = "triton/gated_scan.py.jinja"
    entry: ClassVar[str] = "gated_scan"

    @property
    def keys(self) -> int:
        """A power of two that holds the rows of a state."""
        return power_of_two(self.step.key_dim)

    @property
    def block(self) -> int:
        """Value columns of a program: as many as leave its part of the state in registers."""
        return min(power_of_two(self.step.value_dim), max(4096 // self.keys, 8))

    def launches(self, shape: Shape, limits: Limits, tuner: Tuner) -> tuple[LaunchSpec, ...]:
        if self.by_chunks(shape):
            return GatedChunksKernel(self.step, limits.max_batch_size).launches(shape, limits, tuner)
        operands = {name: f"{name}_ptr" for name in ("q", "k", "v", "decay", "beta", "o")}
        grid = (extent("num_seqs"), Extent(self.step.heads), Extent(-(-self.step.value_dim // self.block)))
        source = render(self.template, self, self.step)
        return (LaunchSpec(source, self.entry, self.pointers(**operands) + self.state_args(), grid),)

    def scratch(self, shape: Shape, limits: Limits, tuner: Tuner) -> dict[str, int]:
        if not self.step.delta or not self.by_chunks(shape):
            return {}
        return {"solved": 4 * shape.max_tokens * self.step.heads * CHUNK}

    def by_chunks(self, shape: Shape) -> bool:
        """Whether prompts are processed in chunks: a decay is one number, keys fit into registers, and bits may depend
        on how a prompt is divided, which deterministic engines (shape.typical) do not allow."""
        return not (shape.decode or shape.typical or self.step.row_decay) and self.keys <= MOST_KEYS


@dataclass(frozen=True)
class GatedChunksKernel(StateKernel[steps.GatedScan]):
    """Prompts of a GatedScan as products over chunks of tokens. most_seqs: the most sequences of a step.

    One kernel solves all chunks in parallel; another walks the chunks of a sequence, with a program per block of value
    columns of one head. The rule is Yang et al. 2024, "Parallelizing linear transformers with the delta rule over
    sequence length", with decays (Gated DeltaNet); without the delta it is Mamba-2's (Dao and Gu 2024).
    """

    template: ClassVar[str] = "triton/gated_chunks.py.jinja"
    most_seqs: int

    @property
    def chunk(self) -> int:
        """Tokens of a chunk."""
        return CHUNK

    @property
    def seqs(self) -> int:
        """A power of two that holds the sequences of a step."""
        return power_of_two(self.most_seqs)

    @property
    def part(self) -> int:
        """Rows of a state that a product reads at once; matrix units need at least 16."""
        return max(min(power_of_two(self.step.key_dim), PART), 16)

    @property
    def parts(self) -> range:
        """The numbers of the parts that the rows of a state are divided into."""
        return range(-(-self.step.key_dim // self.part))

    @property
    def chunk_block(self) -> int:
        """Value columns of a program: as many as leave its part of the state in registers."""
        keys = power_of_two(self.part * len(self.parts))
        return max(min(power_of_two(self.step.value_dim), 2048 // keys), 16)

    def launches(self, shape: Shape, limits: Limits, tuner: Tuner) -> tuple[LaunchSpec, ...]:
        s, source = self.step, render(self.template, self, self.step)
        pointers = {a.name: a for a in self.pointers(**{f: f"{f}_ptr" for f in ("q", "k", "v", "decay", "beta", "o")})}
        solved = (scratch_arg("solved", "*fp32"),) if s.delta else ()
        grid = (extent("num_seqs"), Extent(s.heads), Extent(-(-s.value_dim // self.chunk_block)))
        chunks = LaunchSpec(source, "gated_chunks", (*pointers.values(), *solved, *self.state_args()), grid)
        if not s.delta:
            return (chunks,)
        given = tuple(pointers[name] for name in ("k_ptr", "decay_ptr", "beta_ptr") if name in pointers)
        sizes = (size_arg("num_tokens"), size_arg("num_seqs"))
        grid = (extent("num_tokens", CHUNK), Extent(s.heads), ONE)
        first = LaunchSpec(source, "gated_solve", (*given, *solved, batch_arg("seq_starts"), *sizes), grid)
        return (first, chunks)


@dataclass(frozen=True)
class SelectiveScanKernel(StateKernel[steps.SelectiveScan]):
    """A selective scan; a program computes a block of channels."""

    template: ClassVar[str] = "triton/selective_scan.py.jinja"
    entry: ClassVar[str] = "selective_scan"

    @property
    def states(self) -> int:
        """A power of two that holds the states of a channel."""
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
class ChannelScanKernel(StateKernel[steps.ChannelScan]):
    """A scan per channel; a program computes a block of channels."""

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

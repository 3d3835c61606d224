"""What a Triton kernel is before it is compiled: rendered source, arguments and grid, per phase of the plan.

A kernel class is a frozen dataclass that is made from `Kernel.params` of the program; `launches` renders its template
with every compile-time fact baked in. Nothing here imports triton.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ....runtime.format.batch import PLAN_ARRAYS
from ....runtime.format.manifest import Limits
from ....runtime.format.plan import Extent
from .tiling.choice import Tuner

# Triton's names of the element types of the program
ELEMENTS = {"f32": "fp32", "bf16": "bf16", "f16": "fp16", "i32": "i32", "i8": "i8", "u8": "u8"}
ONE = Extent(1)


@dataclass(frozen=True)
class Arg:
    """One argument: its name in the source, its Triton type ("*bf16", "i32"), and what the plan passes.

    `aligned`: a pointer that is always a multiple of 16 bytes, or an integer that is always a multiple of 16.
    """

    name: str
    type: str
    value: str
    aligned: bool = True


@dataclass(frozen=True)
class LaunchSpec:
    """One launch: `entry` of the rendered `source`. A grid dimension is symbolic in the batch.

    `spill`: whether the kernel may use local memory; decode kernels may not, and the build checks that.
    """

    source: str
    entry: str
    args: tuple[Arg, ...]
    grid: tuple[Extent, Extent, Extent]
    num_warps: int = 4
    num_stages: int = 2


@dataclass(frozen=True)
class Shape:
    """The steps that a phase serves: up to `max_tokens` tokens, and if `decode`, one token per sequence.

    typical: how many tokens tilings are chosen for; 0: max_tokens.
    """

    max_tokens: int
    decode: bool
    typical: int = 0

    @property
    def tiled_tokens(self) -> int:
        return self.typical or self.max_tokens


@dataclass(frozen=True, kw_only=True)
class TritonKernel:
    """Common to all kernels.

    rows: what one row of the output is, "tokens" or "logit_rows". types: element type of each operand, inputs first and
    then outputs, "" where an optional one is absent. aligned: whether each operand's rows begin at multiples of 16
    bytes in every step that launches the kernel.
    """

    template: ClassVar[str]
    rows: str = "tokens"
    types: tuple[str, ...] = ()
    aligned: tuple[bool, ...] = ()

    @property
    def num_rows(self) -> str:
        """The symbol of the number of rows."""
        return f"num_{self.rows}"

    def launches(self, shape: Shape, limits: Limits, tuner: Tuner) -> tuple[LaunchSpec, ...]:
        """The launches of this kernel in steps of `shape`, in order."""
        raise NotImplementedError

    def scratch(self, shape: Shape, limits: Limits, tuner: Tuner) -> dict[str, int]:
        """Bytes of each scratch area by name; a launch's argument refers to one as "scratch:<name>"."""
        return {}

    def pointers(self, *names: str) -> tuple[Arg, ...]:
        """Arguments for all operands in order, inputs named first; a name of an absent operand is left out.

        `names` are those of all operands; how many of them are inputs follows from `inputs`.
        """
        args: list[Arg] = []
        for i, (name, kind, aligned) in enumerate(zip(names, self.types, self.aligned, strict=True)):
            if kind:
                value = f"input:{i}" if i < self.inputs else f"output:{i - self.inputs}"
                args.append(Arg(name, "*" + ELEMENTS[kind], value, aligned))
        return tuple(args)

    inputs: ClassVar[int]


def batch_arg(name: str) -> Arg:
    """An array of the batch; it begins at an aligned address. KeyError if GPUs are given no such array."""
    return Arg(name, "*" + ELEMENTS[PLAN_ARRAYS[name].dtype], name)


def size_arg(name: str) -> Arg:
    """One of the batch's sizes, passed as an int32 that may be anything."""
    return Arg(name, "i32", name, aligned=False)

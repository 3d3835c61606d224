"""A Triton kernel before it is compiled: rendered source, arguments and grid, per phase of the plan.

A kernel is a frozen dataclass over a step of the program; `launches` renders its template with every compile-time fact
baked in. Nothing here imports triton.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

from ....runtime.format.batch import PLAN_ARRAYS
from ....runtime.format.manifest import Limits
from ....runtime.format.plan import BatchArg, Exchange, Extent, LaunchArg, OperandArg, ScratchArg, SizeArg
from ...program.steps.base import QuantizedRows, Step, begins_aligned
from .bounds.forms import Number
from .tiling.choice import Tuner
from .tiling.whole import StageProduct

# Triton's names of the element types of the program
ELEMENTS = {"f32": "fp32", "bf16": "bf16", "f16": "fp16", "i32": "i32", "i8": "i8", "u8": "u8"}
ONE = Extent(1)


@dataclass(frozen=True)
class Arg:
    """One argument: its name in the source, its Triton type ("*bf16", "i32"), and the value that the plan passes.

    `aligned`: a pointer that is always a multiple of 16 bytes, or an integer that is always a multiple of 16.
    """

    name: str
    type: str
    value: LaunchArg
    aligned: bool = True


@dataclass(frozen=True)
class LaunchSpec:
    """One launch: `entry` of the rendered `source`. A grid dimension is symbolic in the batch.

    `dependent`: whether the kernel itself waits for the one before it (dependent.py). exchange: the communicator's
    operation that may replace it; if that is the only way, there is no source. resident: whether its programs wait for
    each other and must all be resident at once; any number of them gives the same result. max_registers: limit of
    registers per thread, so that enough programs fit; 0: no limit.
    """

    source: str
    entry: str
    args: tuple[Arg, ...]
    grid: tuple[Extent, Extent, Extent]
    num_warps: int = 4
    num_stages: int = 2
    dependent: bool = False
    exchange: Exchange | None = None
    resident: bool = False
    max_registers: int = 0


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
        """The tokens of a step that tilings are chosen for."""
        return self.typical or self.max_tokens


class TritonKernel:
    """The base of all kernels, including those that run before and after the program's steps."""

    template: ClassVar[str]

    def launches(self, shape: Shape, limits: Limits, tuner: Tuner) -> tuple[LaunchSpec, ...]:
        """The launches of this kernel in steps of `shape`, in order."""
        raise NotImplementedError

    def staged(self) -> TritonKernel:
        """The kernel in the variant whose launches can be stages of a step kernel."""
        return self

    def stage_product(self, shape: Shape, tuner: Tuner) -> StageProduct | None:
        """The tilings that the kernel may have as a stage; None if it has only one form."""
        return None

    def scratch(self, shape: Shape, limits: Limits, tuner: Tuner) -> dict[str, int]:
        """Bytes of each scratch area by name; a launch's argument refers to one by a ScratchArg of that name."""
        return {}

    def scratch_values(self, sizes: Mapping[str, Number]) -> dict[str, tuple[Number, Number]]:
        """The least and largest value of the integers in scratch areas that are used as indices; sizes: the batch's
        sizes."""
        return {}


S = TypeVar("S", bound=Step)


@dataclass(frozen=True)
class StepKernel(TritonKernel, Generic[S]):
    """The kernel of a step. Its template gets the step as `s` and these parameters as `p`."""

    step: S

    @classmethod
    def refusal(cls, step: S) -> str:
        """Why the kernel cannot be made for a step of its op; "" if it can."""
        if any(isinstance(getattr(step, name), QuantizedRows) for name in step.__struct_fields__):
            return "rows of int8 are not read on a GPU"
        unknown = [o.dtype for o in step.operands.values() if o.dtype not in ELEMENTS]
        return f"unknown dtype {unknown[0]!r}" if unknown else ""

    @property
    def num_rows(self) -> str:
        """The symbol of the number of rows."""
        return f"num_{self.step.rows}"

    @property
    def count(self) -> Arg:
        """The number of rows as an argument."""
        return Arg("num_rows", "i32", SizeArg(self.num_rows), aligned=False)

    def pointers(self, **names: str) -> tuple[Arg, ...]:
        """Arguments of operands in the given order, by their names in the source; operands that the step lacks are left
        out."""
        operands = self.step.operands
        found = [(name, operands[name], text) for name, text in names.items() if name in operands]
        return tuple(Arg(text, "*" + ELEMENTS[o.dtype], OperandArg(name), begins_aligned(o)) for name, o, text in found)


def batch_arg(name: str) -> Arg:
    """An array of the batch; it begins at an aligned address. KeyError if GPUs get no such array."""
    return Arg(name, "*" + ELEMENTS[PLAN_ARRAYS[name].dtype], BatchArg(name))


def scratch_arg(area: str, kind: str = "*i32") -> Arg:
    """A pointer to a scratch area of the step's kernel."""
    return Arg(f"{area}_ptr", kind, ScratchArg(area))


def size_arg(name: str) -> Arg:
    """One of the batch's sizes, passed as an int32 of any value."""
    return Arg(name, "i32", SizeArg(name), aligned=False)

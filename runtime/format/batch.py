"""The arrays of a step, listed in one place: those that the host packs and kernels read, and those that kernels return.

PackedBatch, a GPU's buffers, the C struct of a CPU library (codegen_templates/cpp/abi.h) and the arguments of a launch
plan are made from these lists, or checked against them. The lists here are the same for every engine; further inputs of
a model, such as token types, are in `Program.inputs`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from struct import error as struct_error
from typing import NamedTuple

import msgspec

from .elements import ITEM_SIZE, element_bytes

MOVES_MULTIPLE = 16  # on GPUs, the number of a step's moves is padded to a multiple of this
TOP_LOGPROBS = 20  # how many of the likeliest tokens per row a device reports
_ALIGNED = 4  # elements of 4 bytes: 16 bytes


class BatchArray(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One contiguous array. dtype: a key of `ITEM_SIZE`. kind: "sampling" for a sampling parameter, "sampled" for a
    result of sampling.

    shape: the shape in a step, in symbols: T tokens, S sequences, L logit rows, D rows for which a section is asked, B
    entries of a row of block tables, M moves, G KV groups; V is the width of an output row, H and R are heads and ranks
    of draft heads. Kernels of a layer get their group's part of an array with G. cpu, gpu: whether kernels of these
    back ends get the array. fill: the value of all elements of rows that no request gives, in an array of
    `Program.inputs`. ValueError for an unknown dtype, or a fill that it cannot hold.
    """

    name: str
    shape: tuple[str | int, ...]
    dtype: str = "i32"
    cpu: bool = True
    gpu: bool = True
    kind: str = ""
    fill: int | float = 0

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_SIZE:
            raise ValueError(f"input {self.name}: there is no element type {self.dtype!r}")
        try:
            element_bytes(self.fill, self.dtype)
        except (ArithmeticError, ValueError, struct_error) as error:
            raise ValueError(f"input {self.name}: {self.dtype} cannot hold {self.fill}: {error}") from None

    @property
    def plan_name(self) -> str:
        """Its name in the arguments of a launch plan."""
        return f"{self.kind}:{self.name}" if self.kind else self.name

    @property
    def is_asked(self) -> bool:
        """Whether it is an input of a section that is asked for, with one row per asked row; see `Section`."""
        return self.shape[:1] == ("D",)

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The shape of one row: all sizes after the first axis."""
        return tuple(int(dim) for dim in self.shape[1:])

    @property
    def row_bytes(self) -> int:
        """The size of one row in bytes."""
        return prod(self.row_shape) * ITEM_SIZE[self.dtype]

    @property
    def fill_row(self) -> bytes:
        """The bytes of a row that no request gives."""
        return element_bytes(self.fill, self.dtype) * prod(self.row_shape)


# The inputs of a step. Of the last array only the first S rows are copied to a device.
INPUTS = (
    BatchArray("token_ids", ("T",)),
    BatchArray("positions", ("T",)),
    BatchArray("slot_mapping", ("G", "T")),
    BatchArray("seq_starts", ("S+1",)),
    BatchArray("context_lens", ("S",)),
    BatchArray("logit_rows", ("L",)),
    BatchArray("moves", ("G", "M", 2)),
    BatchArray("parents", ("T",), gpu=False),  # which tokens see which in a tree of draft tokens, for CPUs
    BatchArray("prompt_lens", ("S",), gpu=False),
    BatchArray("tree_masks", ("T", 2), cpu=False),  # and for GPUs
    BatchArray("block_tables", ("S", "G", "B")),
)
BLOCK_TABLES = INPUTS[-1]
# The sampling parameters of each logit row on a GPU: the fields of a SamplingRow.
SAMPLING = (
    BatchArray("temperature", ("L",), "f32", cpu=False, kind="sampling"),
    BatchArray("top_k", ("L",), cpu=False, kind="sampling"),
    BatchArray("top_p", ("L",), "f32", cpu=False, kind="sampling"),
    BatchArray("min_p", ("L",), "f32", cpu=False, kind="sampling"),
    BatchArray("seed", ("L", 2), cpu=False, kind="sampling"),  # its low and high 32 bits
    BatchArray("counter", ("L",), cpu=False, kind="sampling"),
)
# The results of sampling on a GPU: the fields of `Sampled`, in their order.
SAMPLED = (
    BatchArray("token", ("L",), cpu=False, kind="sampled"),
    BatchArray("logprob", ("L",), "f32", cpu=False, kind="sampled"),
    BatchArray("top_ids", ("L", TOP_LOGPROBS), cpu=False, kind="sampled"),
    BatchArray("top_logprobs", ("L", TOP_LOGPROBS), "f32", cpu=False, kind="sampled"),
)
# Arrays that a step of a program may read as an operand, by name, besides the inputs that its program declares.
OPERANDS = tuple(array for array in INPUTS if array.name in ("token_ids", "positions"))
CPU_INPUTS = tuple(array for array in INPUTS if array.cpu)
GPU_INPUTS = (*SAMPLING, *(array for array in INPUTS if array.gpu))  # in the order in which they are copied
OUTPUTS = (
    BatchArray("logits", ("L", "V"), "f32"),
    BatchArray("drafts", ("L", "H", "R")),  # for draft heads, in programs of format 2
)

# Further memory spaces for arguments of launches, by name; see `LaunchPointer`.
MEMORY_SPACES = ("arena", "kv", "scratch", "counters", "weight")

# By the names in the arguments of a launch plan.
PLAN_ARRAYS = {array.plan_name: array for array in (*GPU_INPUTS, *SAMPLED, *OUTPUTS)}


def declaration_problem(declared: Sequence[BatchArray]) -> str:
    """Why a program cannot declare these inputs; "" if it can. Each must have one row per token, or per row that a
    section is asked for, and a unique name."""
    names = [array.name for array in declared]
    taken = {array.name for array in (*INPUTS, *SAMPLING, *SAMPLED, *OUTPUTS)} | {"draft_rows", *MEMORY_SPACES}
    for array in declared:
        if not array.name.isidentifier() or array.name in taken or names.count(array.name) > 1:
            return f"{array.name!r} is no name for an input, or is taken"
        sizes = array.shape[1:]
        if array.shape[0] not in ("T", "D") or not all(isinstance(size, int) and size > 0 for size in sizes):
            return f"input {array.name} has the shape {list(array.shape)}, not one row of fixed sizes per token"
        if array.is_asked and array.dtype not in ("f32", "i32"):
            return f"input {array.name} of a section is of type {array.dtype}, not f32 or i32"
        if array.kind or not (array.cpu and array.gpu):
            return f"input {array.name} must be for every back end"
    return ""


class BatchLimits(NamedTuple):
    """The sizes T, S, B, L and G of the largest step."""

    tokens: int
    seqs: int
    blocks: int
    logit_rows: int
    groups: int = 1

    def shape(self, array: BatchArray) -> tuple[int, ...]:
        """The largest shape of an array whose shape contains no width of the model."""
        sizes = {
            "T": self.tokens, "S": self.seqs, "S+1": self.seqs + 1, "B": self.blocks, "L": self.logit_rows,
            "M": self.tokens + MOVES_MULTIPLE, "G": self.groups,
        }  # fmt: skip
        if self.groups > 1 and "G" in array.shape:  # so that every group's part has the alignment of the array
            sizes |= {name: -(-sizes[name] // _ALIGNED) * _ALIGNED for name in ("T", "B", "M")}
        return tuple(dim if isinstance(dim, int) else sizes[dim] for dim in array.shape)

    def group_bytes(self, array: BatchArray) -> int:
        """The distance in bytes between the parts of two groups; 0 if the array is not divided into groups."""
        if "G" not in array.shape:
            return 0
        return ITEM_SIZE[array.dtype] * prod(self.shape(array)[array.shape.index("G") + 1 :])

    @property
    def table_stride(self) -> int:
        """The distance, in entries, between the block tables of two sequences in one group."""
        return prod(self.shape(BLOCK_TABLES)[1:])

    def nbytes(self, array: BatchArray) -> int:
        """The size in bytes of the largest shape."""
        return ITEM_SIZE[array.dtype] * prod(self.shape(array))

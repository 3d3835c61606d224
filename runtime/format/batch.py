"""The arrays of a step, listed once: what the host packs, what kernels read, and what they give back.

PackedBatch, a GPU's buffers, the C struct of a CPU library (codegen_templates/cpp/abi.h) and the arguments of a launch
plan are made from these lists, or checked against them.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import msgspec

MOVES_MULTIPLE = 16  # the moves of a GPU's step are padded to a multiple
TOP_LOGPROBS = 20  # of the likeliest tokens per row that a device reports
ITEM_BYTES = 4  # of every element
_ALIGNED = 4  # elements: 16 bytes


class BatchArray(msgspec.Struct, frozen=True):
    """One array, contiguous. dtype: "i32" or "f32". kind: "sampling" or "sampled" where it is about that.

    shape: of a step, in symbols: T tokens, S sequences, L logit rows, B entries of a row of block tables, M moves, G KV
    groups; V is the width of a row of the output, H and R are heads and ranks of draft heads. Of an array with G, the
    kernels of a layer are given the part of its group. cpu, gpu: whether the kernels of these back ends are given it.
    """

    name: str
    shape: tuple[str | int, ...]
    dtype: str = "i32"
    cpu: bool = True
    gpu: bool = True
    kind: str = ""

    @property
    def plan_name(self) -> str:
        """What the arguments of a launch plan call it."""
        return f"{self.kind}:{self.name}" if self.kind else self.name


# What a step computes. The last is the only one of which no more travels to a device than its first S rows.
INPUTS = (
    BatchArray("token_ids", ("T",)),
    BatchArray("positions", ("T",)),
    BatchArray("slot_mapping", ("G", "T")),
    BatchArray("seq_starts", ("S+1",)),
    BatchArray("context_lens", ("S",)),
    BatchArray("logit_rows", ("L",)),
    BatchArray("moves", ("G", "M", 2)),
    BatchArray("parents", ("T",), gpu=False),  # which tokens see which in a tree of guesses, for CPUs
    BatchArray("prompt_lens", ("S",), gpu=False),
    BatchArray("tree_masks", ("T", 2), cpu=False),  # and for GPUs
    BatchArray("block_tables", ("S", "G", "B")),
)
BLOCK_TABLES = INPUTS[-1]
# How a GPU samples each logit row: the fields of a SamplingRow.
SAMPLING = (
    BatchArray("temperature", ("L",), "f32", cpu=False, kind="sampling"),
    BatchArray("top_k", ("L",), cpu=False, kind="sampling"),
    BatchArray("top_p", ("L",), "f32", cpu=False, kind="sampling"),
    BatchArray("min_p", ("L",), "f32", cpu=False, kind="sampling"),
    BatchArray("seed", ("L", 2), cpu=False, kind="sampling"),  # its low and high 32 bits
    BatchArray("counter", ("L",), cpu=False, kind="sampling"),
)
# What it sampled: the fields of `Sampled`, in their order.
SAMPLED = (
    BatchArray("token", ("L",), cpu=False, kind="sampled"),
    BatchArray("logprob", ("L",), "f32", cpu=False, kind="sampled"),
    BatchArray("top_ids", ("L", TOP_LOGPROBS), cpu=False, kind="sampled"),
    BatchArray("top_logprobs", ("L", TOP_LOGPROBS), "f32", cpu=False, kind="sampled"),
)
CPU_INPUTS = tuple(array for array in INPUTS if array.cpu)
GPU_INPUTS = (*SAMPLING, *(array for array in INPUTS if array.gpu))  # in the order in which they travel
OUTPUTS = (
    BatchArray("logits", ("L", "V"), "f32"),
    BatchArray("drafts", ("L", "H", "R")),  # written by the section of the draft heads, if there is one
)

# By the name that the arguments of a launch plan give them.
PLAN_ARRAYS = {array.plan_name: array for array in (*GPU_INPUTS, *SAMPLED, *OUTPUTS)}


class BatchLimits(NamedTuple):
    """The largest step: its T, S, B, L and G."""

    tokens: int
    seqs: int
    blocks: int
    logit_rows: int
    groups: int = 1

    def shape(self, array: BatchArray) -> tuple[int, ...]:
        """The largest shape of an array that no width of the model is part of."""
        sizes = {
            "T": self.tokens, "S": self.seqs, "S+1": self.seqs + 1, "B": self.blocks, "L": self.logit_rows,
            "M": self.tokens + MOVES_MULTIPLE, "G": self.groups,
        }  # fmt: skip
        if self.groups > 1 and "G" in array.shape:  # so that every group's part is as aligned as the array
            sizes |= {name: -(-sizes[name] // _ALIGNED) * _ALIGNED for name in ("T", "B", "M")}
        return tuple(dim if isinstance(dim, int) else sizes[dim] for dim in array.shape)

    def group_bytes(self, array: BatchArray) -> int:
        """How far the parts of two groups are apart; 0 if the array is not divided into groups."""
        if "G" not in array.shape:
            return 0
        return ITEM_BYTES * prod(self.shape(array)[array.shape.index("G") + 1 :])

    @property
    def table_stride(self) -> int:
        """How many entries the block tables of two sequences in one group are apart."""
        return prod(self.shape(BLOCK_TABLES)[1:])

    def nbytes(self, array: BatchArray) -> int:
        """Bytes of the largest shape."""
        return ITEM_BYTES * prod(self.shape(array))

"""The program: the lowered model as a list of kernel launches over an arena, shared by compiler and runtime.

A program is what remains of the graph after the passes: a list of steps, each one kernel and its operands. Activations
live in one static arena. A buffer holds one row per token (or per logit row), and its address is
`arena + buffer.offset * num_tokens`, so one plan serves every batch size. All shapes below exclude that leading row
dimension.
"""

from __future__ import annotations

import msgspec

from .access import Access, Columns
from .kv import KVLayout
from .plan import LaunchPlan
from .speculation import Speculation

Param = int | float | str | bool | Access | list[int | str | bool | Access | Columns]

# element sizes in bytes of everything that a buffer or weight can hold
ITEM_SIZE = {"f32": 4, "bf16": 2, "f16": 2, "i32": 4, "i8": 1, "u8": 1}


class Buffer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One activation in the arena: `rows` rows of `shape` elements, contiguous.

    `offset` is in bytes per token: the buffer starts at `arena + offset * num_tokens` and spans
    `row_bytes * num_tokens` bytes. Offsets are multiples of 64. Buffers whose lifetimes do not overlap may share bytes.
    """

    name: str
    dtype: str
    shape: list[int]
    rows: str  # "tokens" or "logit_rows" (never more rows than tokens)
    offset: int


HEADS, EXIT = "medusa", "exit"  # the sections that there are, see `Section`
DRAFTS = "drafts"  # the output operand of the draft heads' choices, int32 [logit_rows, heads, ranks]


class Operand(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a kernel finds one argument.

    space: "buffer" (name of a Buffer; `offset` in elements is added to each row's start), "weight" (name in
    `Program.weights`), "input" (a field of the batch: token_ids, positions), "output" (the logits, float32
    `[logit_rows, vocab]`; or, by the name DRAFTS, what draft heads choose), or "none" (an optional operand that is
    absent).
    """

    space: str
    name: str = ""
    offset: int = 0


class Kernel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One specialised kernel: the lowered op it implements and every compile-time fact, strides included."""

    op: str
    params: dict[str, Param]


class Step(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One launch: `kernel` names an entry of `Program.kernels`; `layer` is the KV layer of attention steps, else -1."""

    kernel: str
    inputs: list[Operand]
    outputs: list[Operand]
    layer: int = -1


class Weight(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One weight as packed in the weights file.

    `format` is the packed layout (f32, bf16, f16 rows as they are, or a packed format of the target such as q4);
    `shape` is the logical shape before packing; `nbytes` the packed size, a multiple of 64.
    """

    format: str
    shape: list[int]
    nbytes: int


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Steps [begin, end) of the program that a step leaves out, and that run on demand after it: `name` says what for.

    "medusa" runs after a step, and its "logit_rows" are some of that step's. "exit" is a step of its own, the early
    exit of self-speculation: the first `shared` steps of the program, then those that give its logits.
    """

    name: str
    begin: int
    end: int
    shared: int = 0


class Program(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Everything an executor needs besides the bytes of weights and kernels. Sections come after the other steps."""

    kernels: dict[str, Kernel]
    steps: list[Step]
    buffers: list[Buffer]
    weights: dict[str, Weight]
    kv: KVLayout
    arena_bytes_per_token: int
    vocab_size: int  # width of a row of the output: the vocabulary, or the dimension of hidden states
    plan: LaunchPlan | None = None  # of GPU engines; a CPU engine's library walks the steps itself
    sections: list[Section] = []
    speculation: Speculation | None = None
    samples: bool = True  # whether the output are logits, which a token can be drawn from

    @property
    def own_steps(self) -> list[Step]:
        """The steps that run every time: those before the sections."""
        return self.steps[: min((section.begin for section in self.sections), default=len(self.steps))]

    def steps_of(self, name: str) -> list[Step]:
        """The steps that a section runs, the shared ones included; the program's own for ""."""
        found = self.section(name)
        if found is None:
            return self.own_steps
        part = self.sections[found]
        return self.steps[: part.shared] + self.steps[part.begin : part.end]

    def kv_of(self, name: str) -> KVLayout:
        """The KV layers that a section uses, and those before them."""
        return self.kv.first_layers(max((step.layer for step in self.steps_of(name)), default=-1) + 1)

    def section(self, name: str) -> int | None:
        """The number of the section of that name; None if there is none."""
        return next((number for number, section in enumerate(self.sections) if section.name == name), None)

    def buffer(self, name: str) -> Buffer:
        """The buffer of that name; KeyError if there is none."""
        for buffer in self.buffers:
            if buffer.name == name:
                return buffer
        raise KeyError(name)

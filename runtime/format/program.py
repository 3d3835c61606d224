"""The program: the lowered model as a list of kernel launches over an arena, shared by compiler and runtime.

A program is what remains of the graph after the passes: a list of steps, each one kernel and its operands. Activations
live in one static arena. A buffer holds one row per token (or per logit row), and its address is
`arena + buffer.offset * num_tokens`, so one plan serves every batch size. All shapes below exclude that leading row
dimension.
"""

from __future__ import annotations

from math import prod

import msgspec

from .adapters import AdapterPlan
from .batch import BatchArray
from .elements import ITEM_SIZE
from .kv import KVLayout
from .plan import LaunchPlan
from .speculation import Speculation


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


LOGITS = "logits"  # the output of a step, see operands.py
DRAFTS = "drafts"  # a further output, in programs of format 2
ASKED_ROWS = "draft_rows"  # an input of sections: the indices of the step's logit rows for which a section is asked


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One launch, as far as the runtime knows: `kernel` names an entry of `Program.kernels`.

    The op's own fields and operands belong to the compiler (compiler/program/steps) and are not read here, so that a
    program may hold ops that this runtime does not know. For launches on a GPU, see its `Call` in the plan.
    """

    kernel: str = ""


class WeightEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One weight as packed in the weights file.

    `format` is the packed layout (f32, bf16, f16 rows as they are, or a packed format of the target such as q4);
    `shape` is the logical shape before packing; `nbytes` the packed size, a multiple of 64.
    """

    format: str
    shape: list[int]
    nbytes: int


class SectionArray(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An input or output of a section: contiguous rows of `shape` elements of type `dtype`, in the buffer or the array
    of the batch that `at` names."""

    dtype: str
    shape: list[int]
    at: str

    @property
    def row_bytes(self) -> int:
        """The size of one row in bytes."""
        return prod(self.shape) * ITEM_SIZE[self.dtype]


def section_behind(step: str, name: str) -> str:
    """A program's name for the section `name` that runs after a step of its section `step`; "" is a step of the whole
    program."""
    return f"{step}.{name}" if step else name


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Steps [begin, end) of the program, which a usual step leaves out and which run when asked for, with named inputs
    and outputs: one row of each per asked row.

    They run after a step of the whole program, or, if the name is `section_behind(other, ..)`, of the section `other`,
    and may read that step's buffers. A section with the output LOGITS is a step itself: it takes a batch, and runs the
    first `shared` steps of the program, then its own. instead: an input that the program declares; a batch in which a
    sequence gives rows of it runs this section in place of the program; "" for none.
    """

    name: str
    begin: int
    end: int
    shared: int = 0
    inputs: dict[str, SectionArray] = {}
    outputs: dict[str, SectionArray] = {}
    instead: str = ""

    @property
    def is_step(self) -> bool:
        """Whether it takes a batch and computes the batch's logits."""
        return LOGITS in self.outputs


class Program(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Everything an executor needs except the bytes of weights and kernels. The steps of sections come after the
    others.

    kernels: the op of every kernel, by the kernel's name. inputs: arrays that its steps read besides those of every
    engine (`format.batch.INPUTS`), one row per token. adapters: its room for adapters; None: it has none. screens:
    whether a step can leave out logits that cannot be the largest, for batches that only want the largest.
    """

    kernels: dict[str, str]
    steps: tuple[Step, ...]
    buffers: list[Buffer]
    weights: dict[str, WeightEntry]
    kv: KVLayout
    arena_bytes_per_token: int
    vocab_size: int  # width of an output row: the vocabulary, or the dimension of hidden states
    plan: LaunchPlan | None = None  # None for CPU engines, whose library walks the steps itself
    sections: list[Section] = []
    speculation: Speculation | None = None
    inputs: list[BatchArray] = []
    adapters: AdapterPlan | None = None
    samples: bool = True  # whether the output are logits, from which tokens can be sampled
    screens: bool = False

    @property
    def stored(self) -> dict[str, WeightEntry]:
        """The weights in the file of weights: all but the pools of adapters."""
        pools = {pool.weight for pool in self.adapters.pools} if self.adapters else ()
        return {name: weight for name, weight in self.weights.items() if name not in pools} if pools else self.weights

    @property
    def num_own_steps(self) -> int:
        """How many steps every run of the program has: those before the sections."""
        return min((section.begin for section in self.sections), default=len(self.steps))

    def steps_of(self, name: str) -> list[int]:
        """The indices of the steps that a section runs, shared ones included; for "" those of the whole program without
        sections."""
        for section in self.sections:
            if section.name == name:
                return [*range(section.shared), *range(section.begin, section.end)]
        return list(range(self.num_own_steps))

    def kv_of(self, name: str) -> KVLayout:
        """The KV layers up to the last one that the launches of a section use. For "", the whole program, those of
        sections that may run in its place count, too. Requires a plan."""
        assert self.plan is not None
        names = [name] if name else [name, *(section.name for section in self.sections if section.instead)]
        used = (self.plan.calls[n].layer for one in names for n in self.steps_of(one))
        return self.kv.first_layers(max(used, default=-1) + 1)

    def section(self, name: str) -> int | None:
        """The index of the section of that name; None if there is none."""
        return next((number for number, section in enumerate(self.sections) if section.name == name), None)

    def samples_in(self, name: str) -> bool:
        """Whether a run of a section computes logits to sample from; True for "", the whole program."""
        number = self.section(name)
        return number is None or self.sections[number].is_step

    def buffer(self, name: str) -> Buffer:
        """The buffer of that name; KeyError if there is none."""
        for buffer in self.buffers:
            if buffer.name == name:
                return buffer
        raise KeyError(name)

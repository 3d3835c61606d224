"""The launch plan of a GPU engine: for every kind of step, which kernel objects run, on which grid, with which
arguments.

An executor only walks the plan: it picks the first phase that a batch fits, and for each call it makes the launches
that the phase lists for the call's kernel. Sizes are symbolic in the batch, so nothing is decided at run time.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from .operands import Operand

# The symbols of an extent, and the integers that a launch may pass.
SIZES = ("num_tokens", "num_seqs", "num_logit_rows", "max_blocks", "num_moves")
RANK = "rank"  # another possible argument: the number of the rank that launches
# And for rows that ranks divide (`OwnRows`): the rank's first row and its number of rows; how many rows every rank has,
# 0 in a step that is not divided; and how many more the last rank has.
FIRST_OWN, OWN_TOKENS, EVEN_TOKENS, REST_TOKENS = ROWS = ("first_own", "own_tokens", "even_tokens", "rest_tokens")

HIDDEN_POINTERS = 2  # trailing arguments of every Triton kernel: pointers to scratch memory, which is not used


COUNTERS = 256  # integers per sequence, zero between launches, by which programs find the one that ends last
STEP_COUNTERS = 32  # further such integers, for programs that wait for each other


class Term(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`times * ceil(size / divide)` for one of `SIZES`, or of `ROWS`."""

    size: str
    divide: int = 1
    times: int = 1


class Extent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A symbolic size: `constant` plus the sum of its terms."""

    constant: int = 0
    terms: tuple[Term, ...] = ()

    def value(self, sizes: Mapping[str, int]) -> int:
        """The size for a batch."""
        return self.constant + sum(t.times * -(-sizes[t.size] // t.divide) for t in self.terms)


def extent(size: str, divide: int = 1, times: int = 1, plus: int = 0) -> Extent:
    """`times * ceil(size / divide) + plus`."""
    return Extent(plus, (Term(size, divide, times),))


class KernelObject(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One compiled kernel: its file in the engine, its symbol, and the facts that a launch needs.

    `types` are Triton's types of the arguments: "*bf16" and such for pointers, "i32" for sizes. dependent: whether the
    kernel itself waits for the previous kernel on the stream, so that it may be launched before that one has ended.
    `registers` per thread, `spill_bytes` of local memory per thread and `occupancy` (resident warps over the most that
    a multiprocessor holds) were read from the compiled object; -1 if the target's objects do not state them. `faults`:
    texts about avoidable slow instructions in its disassembled loops, and about accesses that could not be proved to
    lie in their buffers.
    """

    file: str
    entry: str
    types: tuple[str, ...]
    warps: int
    warp_size: int
    shared_bytes: int
    dependent: bool = False
    registers: int = -1
    spill_bytes: int = -1
    occupancy: float = -1.0
    faults: tuple[str, ...] = ()


class _Argument(msgspec.Struct, frozen=True, array_like=True, tag_field="kind", forbid_unknown_fields=True):
    """The base of all arguments of a launch."""


class OperandArg(_Argument, frozen=True, tag="operand"):
    """The address of an operand of the call, by the operand's name."""

    name: str


class BatchArg(_Argument, frozen=True, tag="batch"):
    """An array of the batch: token_ids, positions, slot_mapping, seq_starts, context_lens, block_tables, logit_rows,
    tree_masks or moves."""

    name: str


class SizeArg(_Argument, frozen=True, tag="size"):
    """The value of one of `SIZES`, `ROWS` or `RANK`, an integer."""

    name: str


class KVArg(_Argument, frozen=True, tag="kv"):
    """The address of the KV cache of the call's layer."""


class ScratchArg(_Argument, frozen=True, tag="scratch"):
    """The address `offset` bytes into the scratch area; `name` is the kernel's name for this part."""

    name: str
    offset: int = 0


class CountersArg(_Argument, frozen=True, tag="counters"):
    """The address of `COUNTERS` integers per sequence, all zero; the launch must leave them zero."""


class AreaArg(_Argument, frozen=True, tag="area"):
    """The area (format/exchange.py) of a rank, which all ranks can access; -1: of the rank that launches."""

    rank: int = -1


class OutputArg(_Argument, frozen=True, tag="output"):
    """A result of the program, outside its steps: "logits"."""

    name: str


class SamplingArg(_Argument, frozen=True, tag="sampling"):
    """An array of sampling parameters: temperature, top_k, top_p, min_p, seed or counter."""

    name: str


class SampledArg(_Argument, frozen=True, tag="sampled"):
    """An array of results of sampling: token, logprob, top_ids or top_logprobs."""

    name: str


_CallArg = (
    OperandArg | BatchArg | SizeArg | KVArg | ScratchArg | CountersArg | AreaArg | OutputArg | SamplingArg | SampledArg
)


class CallArg(_Argument, frozen=True, tag="call"):
    """In a `KernelRun`: an argument of one of its calls. call: the call's index in the run."""

    call: int
    arg: _CallArg


class StepCountersArg(_Argument, frozen=True, tag="step_counters"):
    """In a `KernelRun`: the address of `STEP_COUNTERS` integers, all zero, for programs that wait for each other; the
    launch must leave them zero."""


LaunchArg = _CallArg | CallArg | StepCountersArg


class Call(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The inputs of the launches of one step of the program: its operands by name, and its KV layer, -1 for none.

    own: whether a rank runs it for its own rows only, in a step whose rows are divided (`Phase.own`).
    """

    kernel: str
    operands: dict[str, Operand]
    layer: int = -1
    own: bool = False


class OwnRows(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How ranks divide the rows of a step of `least` or more rows: all get the same number, as collectives require, and
    the last rank also gets the remainder, fewer than ranks * step. step: a rank's rows begin at a multiple of it, so
    that they have the alignment of the first row."""

    ranks: int
    least: int
    step: int = 1

    def sizes(self, tokens: int, rank: int) -> dict[str, int]:
        """The values of `ROWS` for a step of `tokens` rows, for a rank."""
        even = tokens // self.ranks // self.step * self.step if tokens >= self.least else 0
        if not even:
            return whole_rows(tokens)
        rest = tokens - self.ranks * even
        own = even + (rest if rank == self.ranks - 1 else 0)
        return {FIRST_OWN: rank * even, OWN_TOKENS: own, EVEN_TOKENS: even, REST_TOKENS: rest}


def whole_rows(tokens: int) -> dict[str, int]:
    """The values of `ROWS` for a step of `tokens` rows that is not divided."""
    return {FIRST_OWN: 0, OWN_TOKENS: tokens, EVEN_TOKENS: 0, REST_TOKENS: 0}


REDUCE_SCATTER, GATHER_ROWS = BY_ROWS = ("reduce_scatter", "all_gather_rows")  # exchanges of rows that are divided


class Exchange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An operation of a communicator (NCCL, RCCL): "all_reduce" (a sum), "all_gather" (the ranks' values one after the
    other), "reduce_scatter" (a sum of which each rank gets its own rows), or "all_gather_rows" (the own rows of all
    ranks).

    It reads from the address in the launch's first argument and writes to that in the second. count: float32 values of
    a rank, or for the last two operations of a row. only: whether there is no kernel that does the same, because the
    ranks cannot access each other's memory.
    """

    op: str
    count: Extent
    only: bool = False


class Launch(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One launch of an object with its arguments in order; a grid dimension is symbolic in the batch.

    exchange: the communicator's operation that replaces the kernel, if the process has a communicator. If this is the
    only way, object is "".
    """

    object: str
    args: tuple[LaunchArg, ...]
    grid: tuple[Extent, Extent, Extent]
    exchange: Exchange | None = None

    @property
    def makes_moves(self) -> bool:
        """Whether it makes the batch's moves; its grid is empty if there are none."""
        return any(term.size == "num_moves" for dim in self.grid for term in dim.terms)


class KernelRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Launches that may replace those of calls [first, first + count), if the device has so many multiprocessors: its
    programs wait for each other, so that all must be resident at once."""

    first: int
    count: int
    multiprocessors: int
    launches: tuple[Launch, ...]


class Phase(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The launches of every kernel for steps of up to `max_tokens` tokens; `decode`: of one token per sequence.

    before: launches before the program's steps (they fill in tokens of the previous step). after: launches after them
    (sampling). runs: in order of their first call. own: how ranks divide rows; None if each rank has all rows, as in
    decode phases.
    """

    max_tokens: int
    decode: bool
    launches: dict[str, tuple[Launch, ...]]
    before: tuple[Launch, ...]
    after: tuple[Launch, ...]
    runs: tuple[KernelRun, ...] = ()
    own: OwnRows | None = None

    def rank_sizes(self, sizes: Mapping[str, int], rank: int) -> dict[str, int]:
        """`SIZES` of a step extended by the rank's values of `RANK` and `ROWS`."""
        tokens = sizes["num_tokens"]
        rows = self.own.sizes(tokens, rank) if self.own is not None else whole_rows(tokens)
        return {**sizes, RANK: rank, **rows}


class LaunchPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All phases, decode phases first, in order of size. scratch_bytes: enough for the largest step. calls: one per
    step."""

    objects: dict[str, KernelObject]
    calls: tuple[Call, ...]
    phases: tuple[Phase, ...]
    scratch_bytes: int

    def phase(self, num_tokens: int, num_seqs: int) -> Phase:
        """The first phase that a batch fits; LookupError if there is none."""
        for phase in self.phases:
            if num_tokens <= phase.max_tokens and (not phase.decode or num_tokens == num_seqs):
                return phase
        raise LookupError(f"no phase for {num_tokens} tokens of {num_seqs} sequences")

    def counters(self, seqs: int) -> int:
        """How many integers that are zero between launches a step of up to `seqs` sequences needs."""
        return COUNTERS * seqs + STEP_COUNTERS * any(phase.runs for phase in self.phases)

    def resources(self) -> list[dict[str, object]]:
        """A row per object: registers and spilled bytes per thread, shared memory, occupancy, faults, its kernels."""
        users: dict[str, dict[str, None]] = {name: {} for name in self.objects}
        for phase in self.phases:
            around = {"before": phase.before, "after": phase.after}
            for kernel, launches in (*phase.launches.items(), *around.items()):
                for launch in launches:
                    if launch.object:
                        users[launch.object][kernel] = None
            for run in phase.runs:  # the last launch runs all calls
                kernels = (call.kernel for call in self.calls[run.first : run.first + run.count])
                users[run.launches[-1].object].update(dict.fromkeys(kernels))
        return [
            {
                "object": name,
                "kernels": list(users[name]),
                "warps": found.warps,
                "registers": found.registers,
                "spill_bytes": found.spill_bytes,
                "shared_bytes": found.shared_bytes,
                "occupancy": found.occupancy,
                "faults": "; ".join(found.faults),
            }
            for name, found in self.objects.items()
        ]

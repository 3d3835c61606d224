"""How much memory a loaded engine takes, to the byte, as the executors allocate it."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from .batch import BatchLimits
from .kv import KVLayout, KVMemory
from .manifest import Limits
from .program import Program

GPU_ALIGN = 256  # bytes, alignment of a GPU's buffers
LOGITS_BYTES = {"cpu": 64 << 20, "cuda": 256 << 20, "hip": 256 << 20}  # bytes of the logits buffer, by back end
# The share of free memory that the KV cache may fill; a GPU's driver needs some for modules and graphs.
KV_SHARES = {"cpu": 0.4, "cuda": 0.92, "hip": 0.92}


class Footprint(msgspec.Struct, frozen=True):
    """The sizes in bytes of an engine's buffers. weights: as packed. adapters: the room for them. arena: activations of
    the largest step. scratch: memory that GPU kernels use besides the arena. logits: of one step. kv_sequence,
    kv_batch: the KV cache for one sequence of full length, and for a full batch of them."""

    weights: int
    arena: int
    scratch: int
    logits: int
    kv_sequence: int
    kv_batch: int
    adapters: int = 0

    @property
    def fixed(self) -> int:
        """The bytes that do not depend on the requests: all but the KV cache."""
        return self.weights + self.adapters + self.arena + self.scratch + self.logits

    def as_json(self) -> dict[str, int]:
        """All sizes by name, and the total for a full batch."""
        return {**msgspec.structs.asdict(self), "total": self.fixed + self.kv_batch}


def footprint(program: Program, limits: Limits, backend: str, scratch: int | None = None) -> Footprint:
    """The footprint of a program within its limits on a back end: "cpu", "cuda" or "hip".

    scratch: bytes, for a program whose launch plan is not made yet; None: as its plan says.
    """
    largest = batch_limits(program, limits, LOGITS_BYTES[backend])
    align = 1 if backend == "cpu" else GPU_ALIGN
    if scratch is None:
        scratch = program.plan.scratch_bytes if program.plan else 0
    one, batch = (program.kv.blocks_needed(limits, sequences) for sequences in (1, limits.max_batch_size))
    stored, whole = (
        sum(-(-weight.nbytes // align) * align for weight in weights.values())
        for weights in (program.stored, program.weights)
    )
    return Footprint(
        weights=stored,
        adapters=whole - stored,
        arena=program.arena_bytes_per_token * largest.tokens,
        scratch=scratch,
        logits=4 * largest.logit_rows * program.vocab_size,
        kv_sequence=KVMemory(program.kv, one).nbytes,
        kv_batch=KVMemory(program.kv, batch).nbytes,
    )


def batch_limits(program: Program, limits: Limits, logits_bytes: int) -> BatchLimits:
    """The sizes of the largest step. Its logits take at most `logits_bytes` bytes, unless a full decode batch needs
    more."""
    seqs = min(limits.max_batch_size, limits.max_step_tokens)
    rows = max(logits_bytes // (4 * program.vocab_size), seqs)
    groups = program.kv.groups
    blocks = max((group.blocks_for(limits.max_seq_len) for group in groups), default=1)
    rows = min(rows, limits.max_step_tokens)
    return BatchLimits(limits.max_step_tokens, seqs, blocks, rows, max(len(groups), 1))


def sequences_within(kv: KVLayout, limits: Limits, nbytes: int, length: int | None = None) -> int:
    """How many sequences of `length` tokens (None: full length) a KV cache of `nbytes` bytes holds at once."""
    asked = Limits(min(length or limits.max_seq_len, limits.max_seq_len), limits.max_batch_size, limits.max_step_tokens)
    return _most(lambda count: KVMemory(kv, kv.blocks_needed(asked, count)).nbytes <= nbytes, 1 << 24)


def length_within(kv: KVLayout, limits: Limits, nbytes: int) -> int:
    """The length in tokens of the longest single sequence, within the engine's limit, that a KV cache of `nbytes` bytes
    holds."""

    def fits(length: int) -> bool:
        asked = Limits(length, 1, limits.max_step_tokens)
        return KVMemory(kv, kv.blocks_needed(asked, 1)).nbytes <= nbytes

    return _most(fits, limits.max_seq_len)


def kv_bytes_read(kv: KVLayout, length: int) -> float:
    """How many bytes of the cache the next token of a sequence of `length` tokens reads."""
    return sum(group.bytes_read(length) for group in kv.groups)


def size_text(count: float) -> str:
    """A number of bytes as readable text, such as 3.5 MiB."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"


def _most(fits: Callable[[int], bool], limit: int) -> int:
    """The largest count up to `limit` that fits, by bisection: if a count fits, all smaller ones must fit. 0 if none
    fits."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low

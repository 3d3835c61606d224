"""CpuExecutor: runs an engine's generated library on this machine's cores."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np

from ...batch.packed import PackedBatch
from ...batch.scheduled import ScheduledBatch
from ...errors import CapacityError, UsageError
from ...format.load import Engine
from ...format.program import HEADS
from ...kv.group import GroupConfig
from .library import IccBatch, KernelLibrary
from .memory import AnonymousMemory, choose_num_blocks, default_threads

_LOGITS_BYTES = 64 << 20  # the logits buffer is this large at most, unless a full batch of decodes needs more
_MAX_THREADS = 1024


class CpuExecutor:
    """One library handle with its arena, KV cache and logits buffer, all allocated once.

    threads: of the kernels, this one included; default: the physical cores that the process may use. kv_bytes: memory
    for the KV cache; default: enough for a full batch, within a share of the machine's memory. section: run this
    section of the program as a step, instead of the program ("exit": its first layers and the head).
    """

    def __init__(
        self, engine: Engine, threads: int | None = None, kv_bytes: int | None = None, section: str = ""
    ) -> None:
        if threads is not None and not 1 <= threads <= _MAX_THREADS:
            raise UsageError(f"threads = {threads}: must be from 1 to {_MAX_THREADS}")
        limits, program = engine.manifest.limits, engine.program
        self.threads = threads or default_threads()
        self._layout = program.kv
        self.block_size = program.kv.block_size
        self.vocab_size = program.vocab_size
        self.max_step_tokens = limits.max_step_tokens
        self.max_batch_size = min(limits.max_batch_size, limits.max_step_tokens)
        rows = max(_LOGITS_BYTES // (4 * self.vocab_size), self.max_batch_size)
        self.max_logit_rows = min(rows, self.max_step_tokens)
        self.num_blocks = choose_num_blocks(program.kv, limits, kv_bytes)
        self.kv_bytes = self.num_blocks * program.kv.total_block_bytes()
        if self.num_blocks * self.block_size > 2**31 - 1:
            raise CapacityError(
                "the KV cache has more slots than an int32 can number", "give it less memory (kv_bytes)"
            )

        assert engine.library is not None
        library = KernelLibrary(engine.files.read(engine.library.path), engine.library.path)
        self._arena = AnonymousMemory(program.arena_bytes_per_token * limits.max_step_tokens)
        self._kv = AnonymousMemory(self.kv_bytes)
        self._logits = np.zeros((self.max_logit_rows, self.vocab_size), dtype=np.float32)
        max_blocks = -(-limits.max_seq_len // self.block_size)
        self._packed = PackedBatch(
            self.max_step_tokens, self.max_batch_size, max_blocks, self.max_logit_rows, self.block_size
        )
        self._batch = _batch_over(self._packed, self._logits)
        self._speculation, self._section = program.speculation, program.section(HEADS)
        self._own_section = program.section(section)
        self.screens = any(kernel.params.get("screened") for kernel in program.kernels.values())
        self._weights = engine.weights  # mapped as long as kernels may read them
        weights = self._weights.addresses(program)
        self._library = library
        self._handle: int | None = library.create(
            self.threads, weights, self._arena.address, self._kv.address, self.num_blocks
        )

    @property
    def groups(self) -> tuple[GroupConfig, ...]:
        """The one KV group."""
        return (GroupConfig(self.num_blocks, self.block_size),)

    def step(self, batch: ScheduledBatch) -> np.ndarray:
        """Run one step: float32 `[batch.num_logit_rows, vocab]`, valid until the next step. Releases the GIL."""
        return self._step(batch, greedy=False)

    def step_greedy(self, batch: ScheduledBatch) -> np.ndarray:
        """The same where only each row's largest logit is wanted; any other may be minus infinity."""
        return self._step(batch, greedy=True)

    def _step(self, batch: ScheduledBatch, greedy: bool) -> np.ndarray:
        if self._handle is None:
            raise UsageError("the engine is closed")
        for block in (block for upkeep in batch.upkeep for block in upkeep.zeros):
            for offset, nbytes in self._layout.block_places(block, self.num_blocks):
                ctypes.memset(self._kv.address + offset, 0, nbytes)
        packed = self._packed
        packed.pack(batch)
        self._batch.num_tokens = packed.num_tokens
        self._batch.num_seqs = packed.num_seqs
        self._batch.num_logit_rows = packed.num_logit_rows
        self._batch.parents = packed.parents.ctypes.data if packed.has_trees else None
        self._batch.num_moves = packed.num_moves
        self._batch.greedy = greedy
        if self._own_section is None:
            self._library.step(self._handle, self._batch)
        else:
            self._library.section(self._handle, self._own_section, self._batch)
        return self._logits[: packed.num_logit_rows]

    def draft(self, rows: Sequence[int]) -> np.ndarray:
        """What the draft heads choose behind these logit rows of the last step: int32 `[rows, heads, ranks]`."""
        if self._handle is None or self._section is None or self._speculation is None:
            raise UsageError("the engine is closed, or has no draft heads")
        wanted = np.array(rows, dtype=np.int32)
        drafts = np.empty((len(wanted), self._speculation.heads, self._speculation.ranks), dtype=np.int32)
        batch, logit_rows = self._batch, self._batch.logit_rows
        batch.num_logit_rows, batch.logit_rows, batch.drafts = len(wanted), wanted.ctypes.data, drafts.ctypes.data
        self._library.section(self._handle, self._section, batch)
        batch.logit_rows = logit_rows
        return drafts

    def close(self) -> None:
        """Stop the threads and free the memory. Calling it again does nothing."""
        if self._handle is None:
            return
        handle, self._handle = self._handle, None
        self._library.destroy(handle)
        self._arena.close()
        self._kv.close()


def _batch_over(packed: PackedBatch, logits: np.ndarray) -> IccBatch:
    """The C struct with the addresses of the arrays; only its counts change from step to step."""
    return IccBatch(
        max_blocks=packed.block_tables.shape[1],
        token_ids=packed.token_ids.ctypes.data,
        positions=packed.positions.ctypes.data,
        slot_mapping=packed.slot_mapping.ctypes.data,
        seq_starts=packed.seq_starts.ctypes.data,
        context_lens=packed.context_lens.ctypes.data,
        block_tables=packed.block_tables.ctypes.data,
        logit_rows=packed.logit_rows.ctypes.data,
        logits=logits.ctypes.data,
        moves=packed.moves.ctypes.data,
    )

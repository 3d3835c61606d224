"""Builds programs by hand and runs their libraries through ctypes, for the tests of the CPU backend.

Where AddressSanitizer is loaded (test_sanitizers.py), everything that a step must not touch is fenced: the gaps between
buffers and around weights, and free KV blocks.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
from cpu_fences import fence, unfence
from icc.compiler.backends.cpu.layouts.dense import ROWS
from icc.compiler.program.program import Program
from icc.compiler.program.steps.base import Step
from icc.runtime.executor.cpu.library import IccBatch
from icc.runtime.format.elements import ITEM_SIZE
from icc.runtime.format.kv import KVGroup, KVLayer, KVLayout
from icc.runtime.format.operands import BufferOperand, WeightOperand
from icc.runtime.format.program import Buffer, WeightEntry
from icc.runtime.kv.places import Places
from icc.runtime.kv.state_group import state_places

DTYPES = {"f32": np.float32, "i32": np.int32, "i8": np.int8}
GAP = 64  # unused bytes after each row of a buffer


@dataclass
class Case:
    """One step of the program: the inputs per buffer, and the expected outputs.

    `expect` takes the arrays of all buffers and weights by name, and returns the expected array per output buffer.
    """

    name: str
    feeds: dict[str, Callable[[np.random.Generator, int], np.ndarray]]
    expect: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]
    tolerance: float = 2e-6


@dataclass
class Builder:
    """Collects kernels, buffers and weights; buffers never overlap, so that the operands of every step can be
    checked."""

    block_size: int = 16
    kv_dtype: str = "f32"
    kernels: dict[str, str] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=list)
    weights: dict[str, WeightEntry] = field(default_factory=dict)
    packed: list[np.ndarray] = field(default_factory=list)
    layers: list[KVLayer] = field(default_factory=list)
    cases: list[Case] = field(default_factory=list)
    columns: dict[str, tuple[int, int]] = field(default_factory=dict)  # of wide buffers: first used, count
    end: int = 0
    vocab: int = 1

    def buffer(
        self, name: str, shape: list[int], dtype: str = "f32", rows: str = "tokens", offset: int = 0
    ) -> BufferOperand:
        """A new buffer, as an operand that starts `offset` elements into each row."""
        self.buffers.append(Buffer(name, dtype, shape, rows, self.end))
        count = int(np.prod(shape))
        size = count * np.dtype(DTYPES[dtype]).itemsize
        self.end += (size + 63) // 64 * 64 + GAP
        return BufferOperand(name, dtype, count, offset)

    def weight(self, name: str, packed: np.ndarray, fmt: str, shape: tuple[int, ...]) -> WeightOperand:
        self.weights[name] = WeightEntry(fmt, list(shape), packed.size)
        self.packed.append(packed)
        return WeightOperand(name, fmt if fmt in ITEM_SIZE else "u8")

    def plain(self, name: str, array: np.ndarray, fmt: str = "f32") -> WeightOperand:
        """A weight stored row-major."""
        return self.weight(name, ROWS[fmt].pack({"values": array}), fmt, array.shape)

    def step(self, step: Step) -> None:
        """Append a step, with a kernel of its own."""
        name = f"{step.op}_{len(self.kernels)}"
        self.kernels[name] = step.op
        self.steps.append(msgspec.structs.replace(step, kernel=name))

    @property
    def holds_states(self) -> bool:
        """Whether its blocks hold recurrent states instead of keys and values."""
        return any(layer.state for layer in self.layers)

    def program(self) -> Program:
        kept = {"keeps": "state", "size": 2} if self.holds_states else {}
        group = KVGroup(self.block_size, self.kv_dtype, dict(enumerate(self.layers)), **kept)
        layout = KVLayout((group,))
        return Program(
            kernels=self.kernels, steps=tuple(self.steps), buffers=self.buffers, weights=self.weights, kv=layout,
            arena_bytes_per_token=self.end, vocab_size=self.vocab,
        )  # fmt: skip


@dataclass
class Batch:
    """A packed step as in abi.h: `sequences` are (first position, number of tokens, block table).

    trees: for each sequence that verifies a tree of drafts, the parent of each token but the first, as an index in the
    sequence. moves: (from, to) slots. policy: where tokens lie in their block tables, and the number of tokens that
    each sequence began with.
    """

    sequences: list[tuple[int, int, list[int]]]
    block_size: int = 16
    token_ids: np.ndarray | None = None
    logit_rows: np.ndarray | None = None
    trees: dict[int, list[int]] = field(default_factory=dict)
    moves: list[tuple[int, int]] = field(default_factory=list)
    greedy: bool = False
    policy: Places | None = None
    prompts: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(count for _, count, _ in self.sequences)

    def arrays(self, states: bool = False) -> dict[str, np.ndarray]:
        """states: slot_mapping is that of a group that holds states."""
        positions, slots, starts, lens, parents = [], [], [0], [], []
        width = max(len(table) for _, _, table in self.sequences)
        tables = np.full((len(self.sequences), width), -1, np.int32)
        for i, (first, count, table) in enumerate(self.sequences):
            tables[i, : len(table)] = table
            parents += [-1, *(starts[-1] + q for q in self.trees[i])] if i in self.trees else [-1] * count
            for p in range(first, first + count):
                parent = parents[len(positions)]
                positions.append(p if parent < 0 else positions[parent] + 1)
                at = p if self.policy is None else self.policy.place(p, self.prompts[i])
                slots.append(-1 if states else table[at // self.block_size] * self.block_size + at % self.block_size)
            if states:
                for p, block in state_places(tuple(table), first, first + count, self.block_size):
                    slots[starts[-1] + p - first] = block
            starts.append(starts[-1] + count)
            lens.append(first + count)
        ids = self.token_ids if self.token_ids is not None else np.arange(self.tokens)
        rows = self.logit_rows if self.logit_rows is not None else np.arange(self.tokens)
        lists = {
            "token_ids": ids, "positions": positions, "slot_mapping": slots, "seq_starts": starts, "context_lens": lens,
            "logit_rows": rows, "parents": parents, "moves": self.moves, "prompt_lens": self.prompts or lens,
        }  # fmt: skip
        return {**{k: np.ascontiguousarray(v, np.int32) for k, v in lists.items()}, "block_tables": tables}


def aligned(size: int, fill: int = 0) -> np.ndarray:
    """Zeroed or filled bytes that start at a multiple of 64, fenced on both sides."""
    raw = np.full(max(size + 128, 1024), fill, np.uint8)  # numpy reuses smaller arrays without freeing them
    start = -raw.ctypes.data % 64 or 64
    fence(raw.ctypes.data, start)
    fence(raw.ctypes.data + start + size, len(raw) - start - size)
    return raw[start : start + size]


class Runner:
    """One loaded library with its arena, KV cache (poisoned with NaN) and threads."""

    def __init__(
        self,
        path: Path,
        builder: Builder,
        threads: int = 2,
        max_tokens: int = 64,
        num_blocks: int = 32,
        poison: int = 0xFF,
    ) -> None:
        self.program, self.columns, self.states = builder.program(), builder.columns, builder.holds_states
        self.library = ctypes.CDLL(str(path))
        self.library.icc_create.restype = ctypes.c_void_p
        self.library.icc_create.argtypes = [
            ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p,
        ]  # fmt: skip
        self.library.icc_step.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        self.library.icc_destroy.argtypes = [ctypes.c_void_p]
        self.max_tokens, self.num_blocks = max_tokens, num_blocks
        self.arena = aligned(max(64, self.program.arena_bytes_per_token * max_tokens))
        self.kv = aligned(max(64, self.program.kv.groups[0].block_bytes() * num_blocks), poison)
        self.withheld: dict[str, int] = {}  # bytes at the end of a buffer that are fenced like a gap
        self.weights = []
        for packed in builder.packed:
            copy = aligned(packed.size)
            copy[:] = packed
            self.weights.append(copy)
        pointers = (ctypes.c_void_p * max(1, len(self.weights)))(*(w.ctypes.data for w in self.weights))
        self._pointers = pointers
        self.handle = self.library.icc_create(
            threads, pointers, self.arena.ctypes.data, self.kv.ctypes.data, ctypes.byref(ctypes.c_int64(num_blocks))
        )
        assert self.handle

    def view(self, name: str, tokens: int, rows: int) -> np.ndarray:
        """The live contents of one buffer."""
        buffer = self.program.buffer(name)
        dtype = np.dtype(DTYPES[buffer.dtype])
        size = int(np.prod(buffer.shape)) * rows * dtype.itemsize
        start = buffer.offset * tokens
        return self.arena[start : start + size].view(dtype).reshape(rows, *buffer.shape)

    def step(self, batch: Batch, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Write `feeds`, run, return a copy of every buffer and "logits"."""
        tokens, arrays = batch.tokens, batch.arrays(self.states)
        assert tokens <= self.max_tokens
        wanted = len(arrays["logit_rows"])
        rows = {b.name: wanted if b.rows == "logit_rows" else tokens for b in self.program.buffers}
        for name, value in feeds.items():
            self.view(name, tokens, rows[name])[...] = value
        logits = np.zeros((max(1, wanted), self.program.vocab_size), np.float32)
        addresses = {name: array.ctypes.data for name, array in arrays.items() if batch.trees or name != "parents"}
        raw = IccBatch(
            num_tokens=tokens, num_seqs=len(batch.sequences), num_logit_rows=wanted, greedy=batch.greedy,
            max_blocks=arrays["block_tables"].shape[1], num_moves=len(batch.moves), logits=logits.ctypes.data,
            **addresses,
        )  # fmt: skip
        self._fence(tokens, rows, arrays["block_tables"])
        code = self.library.icc_step(self.handle, ctypes.byref(raw))
        for memory in (self.arena, self.kv):
            unfence(memory.ctypes.data, memory.size)
        assert code == 0
        return {"logits": logits, **{name: self.view(name, tokens, count).copy() for name, count in rows.items()}}

    def _fence(self, tokens: int, rows: dict[str, int], tables: np.ndarray) -> None:
        """Fence all but the live rows (of wide buffers, the used columns) and the blocks in the tables."""
        [group], kv = self.program.kv.groups, self.kv.ctypes.data
        fence(self.arena.ctypes.data, self.arena.size)
        for buffer in self.program.buffers:
            view = self.view(buffer.name, tokens, rows[buffer.name])
            if buffer.name in self.columns:
                first, count = self.columns[buffer.name]
                for row in view[:, first : first + count]:
                    unfence(row.ctypes.data, row.nbytes)
            else:
                unfence(view.ctypes.data, view.nbytes - self.withheld.get(buffer.name, 0))
        fence(kv, self.kv.size)
        for nbytes in map(group.layer_bytes, group.layers):
            for block in tables[tables >= 0]:
                unfence(kv + int(block) * nbytes, nbytes)
            kv += self.num_blocks * nbytes

    def close(self) -> None:
        if self.handle:
            self.library.icc_destroy(self.handle)
            self.handle = None


def flat_batch(tokens: int, vocab: int = 60, seed: int = 0, block_size: int = 16) -> Batch:
    """`tokens` tokens of one sequence, random ids (some beyond the 50 rows of test tables), some logit rows wanted."""
    rng = np.random.default_rng(seed)
    rows = np.unique(rng.integers(0, tokens, max(1, tokens // 2)))
    blocks = list(range((tokens + block_size - 1) // block_size))
    return Batch([(0, tokens, blocks)], block_size, rng.integers(0, vocab, tokens).astype(np.int32), rows)

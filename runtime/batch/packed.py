"""PackedBatch: a ScheduledBatch as the int32 arrays that kernels read, allocated once."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from ..format.batch import INPUTS, MOVES_MULTIPLE, BatchArray, BatchLimits
from ..kv.sequence import slot_of
from ..kv.state_group import state_places
from .padding import StepSize
from .scheduled import Draft, ScheduledBatch, ScheduledSequence

DTYPES = {"i32": np.dtype(np.int32), "f32": np.dtype(np.float32)}


def host_arrays(arrays: Sequence[BatchArray], limits: BatchLimits) -> dict[str, np.ndarray]:
    """Zeroed arrays of the largest step, by name."""
    return {array.name: np.zeros(limits.shape(array), DTYPES[array.dtype]) for array in arrays}


class PackedBatch:
    """The arrays of `INPUTS` for the largest possible step; `pack` fills their beginnings.

    In a group that holds states, slot_mapping[t] is the block that is left with the state behind token t, or -1.
    Of a sequence's block table in a group only the first `ceil(context_lens[s] / block_size)` entries mean something,
    and of these only those that it still has; logit_rows ascend. Trees of guesses: positions tell depths, and a context
    length counts the places in the cache; parents are indices into the batch, -1 outside of trees; tree_masks have bit
    i of 64 set where a token sees its sequence's token i, and no bit outside of trees.
    """

    def __init__(
        self,
        limits: BatchLimits,
        block_sizes: Sequence[int],
        arrays: Mapping[str, np.ndarray] | None = None,
        states: Collection[int] = (),
    ) -> None:
        """block_sizes: of each KV group. arrays: where those that are needed elsewhere lie; others are made here.
        states: the numbers of the groups that hold states."""
        self.limits, self.block_sizes, self.states = limits, tuple(block_sizes), frozenset(states)
        given = arrays or {}
        self.arrays = {**given, **host_arrays([array for array in INPUTS if array.name not in given], limits)}
        self.token_ids, self.positions = self.arrays["token_ids"], self.arrays["positions"]
        self.slot_mapping, self.block_tables = self.arrays["slot_mapping"], self.arrays["block_tables"]
        self.seq_starts, self.context_lens = self.arrays["seq_starts"], self.arrays["context_lens"]
        self.logit_rows, self.moves = self.arrays["logit_rows"], self.arrays["moves"]
        self.parents, self.tree_masks = self.arrays["parents"], self.arrays["tree_masks"]
        self.parents[:] = -1
        self.num_tokens = self.num_seqs = self.num_logit_rows = self.num_moves = 0
        self.has_trees = False
        self._tables: list[list[tuple[int, ...] | None]] = [  # what each row of block_tables holds, by group
            [None] * limits.seqs for _ in self.block_sizes
        ]

    def pack(self, batch: ScheduledBatch) -> None:
        """Fill the arrays. The batch must be within the limits given when they were made."""
        token = row = 0
        self.num_moves = batch.num_moves
        for group, upkeep in enumerate(batch.upkeep):
            if upkeep.moves:
                self.moves[group, : self.num_moves] = upkeep.moves
        had_trees, self.has_trees = self.has_trees, any(sequence.is_tree for sequence in batch.sequences)
        if had_trees or self.has_trees:
            self.parents[:] = -1
            self.tree_masks[:] = 0
        for index, sequence in enumerate(batch.sequences):
            count = len(sequence.token_ids)
            for group, table in enumerate(sequence.block_tables):
                if self._tables[group][index] is not table:  # unchanged tables are the same object
                    entries = self.block_tables[index, group, : len(table)]
                    entries[:] = table
                    np.maximum(entries, 0, out=entries)  # NO_BLOCK: nothing of it is used, but it may be fetched
                    self._tables[group][index] = table
            self.seq_starts[index] = token
            self.context_lens[index] = sequence.end
            if count == 1:
                self._pack_token(token, sequence.token_ids[0], sequence.start, sequence.block_tables)
            else:
                self._pack_chunk(token, sequence, index)
                if sequence.is_tree:
                    assert sequence.draft is not None
                    self._pack_tree(token, sequence.start, sequence.draft)
            token += count
            if sequence.first_row:
                self.logit_rows[row] = token - count
                row += 1
            elif sequence.num_logits:
                self.logit_rows[row : row + sequence.num_logits] = range(token - sequence.num_logits, token)
                row += sequence.num_logits
        self.seq_starts[len(batch.sequences)] = token
        self.num_tokens, self.num_seqs, self.num_logit_rows = token, len(batch.sequences), row

    def pad(self, size: StepSize) -> None:
        """Make a step as large as that. Added tokens have no slot, added sequences no context; added logit rows repeat
        the last token. Of decodes each added sequence has a token, else the last has all that are added."""
        tokens, seqs, rows = self.num_tokens, self.num_seqs, self.num_logit_rows
        self.token_ids[tokens : size.tokens] = 0
        self.positions[tokens : size.tokens] = 0
        self.slot_mapping[:, tokens : size.tokens] = -1
        self.context_lens[seqs : size.seqs] = 0
        if size.seqs > seqs:
            even = size.tokens - tokens == size.seqs - seqs
            self.seq_starts[seqs + 1 : size.seqs] = range(tokens + 1, size.tokens) if even else tokens
            self.seq_starts[size.seqs] = size.tokens
        self.logit_rows[rows : size.rows] = tokens - 1
        self.num_tokens, self.num_seqs, self.num_logit_rows = size

    def pad_moves(self) -> None:
        """Make their number a multiple, so that few numbers come: the last is made again, which changes nothing."""
        have, count = self.num_moves, -(-self.num_moves // MOVES_MULTIPLE) * MOVES_MULTIPLE
        if have:
            self.moves[:, have:count] = self.moves[:, have - 1 : have]
            self.num_moves = count

    def _pack_tree(self, at: int, start: int, draft: Draft) -> None:
        """Positions and parents of the guesses behind the token at `at`."""
        end = at + 1 + len(draft)
        self.positions[at + 1 : end] = np.array(draft.depths(), dtype=np.int32) + start
        self.parents[at + 1 : end] = np.array(draft.parents, dtype=np.int32) + (at + 1)
        masks = [1]
        for guess, parent in enumerate(draft.parents, start=1):
            masks.append(masks[parent + 1] | 1 << guess)
        self.tree_masks[at:end] = np.array(masks, dtype=np.uint64)[:, None].view(np.int32)

    def _pack_token(self, at: int, token_id: int, position: int, tables: tuple[tuple[int, ...], ...]) -> None:
        self.token_ids[at] = token_id
        self.positions[at] = position
        for group, table in enumerate(tables):
            size = self.block_sizes[group]
            slot = table[position // size] if group in self.states else slot_of(table, position, size)
            self.slot_mapping[group, at] = slot

    def _pack_chunk(self, at: int, sequence: ScheduledSequence, row: int) -> None:
        start, end = sequence.start, at + len(sequence.token_ids)
        positions = np.arange(start, start + len(sequence.token_ids), dtype=np.int32)
        self.token_ids[at:end] = sequence.token_ids
        self.positions[at:end] = positions
        for group, block_size in enumerate(self.block_sizes):
            slots = self.slot_mapping[group, at:end]
            if group not in self.states:
                slots[:] = slot_of(self.block_tables[row, group], positions, block_size)
                continue
            slots[:] = -1
            table, known = sequence.block_tables[group], start + sequence.num_known
            for position, block in state_places(table, start, known, block_size):
                slots[position - start] = block

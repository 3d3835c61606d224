"""PackedBatch: a ScheduledBatch as the int32 arrays that kernels read, allocated once."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from ..format.batch import INPUTS, MOVES_MULTIPLE, BatchArray, BatchLimits
from ..kv.places import Places
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
        places: Mapping[int, Places] | None = None,
    ) -> None:
        """block_sizes: of each KV group. arrays: where those that are needed elsewhere lie; others are made here.
        states: the numbers of the groups that hold states. places: the policies of those that evict, by number."""
        self.limits, self.block_sizes, self.states = limits, tuple(block_sizes), frozenset(states)
        self.places = dict(places or {})
        given = arrays or {}
        self.arrays = {**given, **host_arrays([array for array in INPUTS if array.name not in given], limits)}
        self.token_ids, self.positions = self.arrays["token_ids"], self.arrays["positions"]
        self.slot_mapping, self.block_tables = self.arrays["slot_mapping"], self.arrays["block_tables"]
        self.seq_starts, self.context_lens = self.arrays["seq_starts"], self.arrays["context_lens"]
        self.logit_rows, self.moves = self.arrays["logit_rows"], self.arrays["moves"]
        self.prompt_lens = self.arrays["prompt_lens"]
        self.parents, self.tree_masks = self.arrays["parents"], self.arrays["tree_masks"]
        self.parents[:] = -1
        self.num_tokens = self.num_seqs = self.num_logit_rows = self.num_moves = 0
        self.has_trees = False
        self._rows: list[tuple[tuple[int, ...], ...] | None] = [None] * limits.seqs  # what block_tables holds

    def pack(self, batch: ScheduledBatch) -> None:
        """Fill the arrays. The batch must be within the limits given when they were made."""
        self.num_moves = batch.num_moves
        for group, upkeep in enumerate(batch.upkeep):
            if upkeep.moves:
                self.moves[group, : self.num_moves] = upkeep.moves
        had_trees, self.has_trees = self.has_trees, any(sequence.is_tree for sequence in batch.sequences)
        if had_trees or self.has_trees:
            self.parents[:] = -1
            self.tree_masks[:] = 0
        starts, ends, rows = [0], [], []
        ones: list[tuple[int, int, int, int]] = []  # of sequences of one token, which are packed together
        token = 0
        for index, sequence in enumerate(batch.sequences):
            token_ids, start, tables, num_logits = sequence[1:5]
            count = len(token_ids)
            if self._rows[index] is not tables:  # unchanged tables are the same objects
                self._pack_tables(index, tables)
            if count == 1:
                ones.append((index, token, token_ids[0], start))
            else:
                self._pack_chunk(token, sequence, index)
                if sequence.is_tree:
                    assert sequence.draft is not None
                    self._pack_tree(token, start, sequence.draft)
            token += count
            starts.append(token)
            ends.append(start + count)
            if num_logits == 1:
                rows.append(token - count if sequence.first_row else token - 1)
            elif num_logits:
                rows.extend(range(token - num_logits, token))
        if self.places:
            self.prompt_lens[: len(ends)] = [sequence.prompt for sequence in batch.sequences]
        if ones:
            self._pack_ones(*np.array(ones).T)
        self.num_tokens, self.num_seqs, self.num_logit_rows = token, len(ends), len(rows)
        self.seq_starts[: len(starts)] = starts
        self.context_lens[: len(ends)] = ends
        self.logit_rows[: len(rows)] = rows

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

    def _pack_tables(self, index: int, tables: tuple[tuple[int, ...], ...]) -> None:
        """The block tables of a sequence, as far as they have changed."""
        before = self._rows[index]
        for group, table in enumerate(tables):
            if before is None or before[group] is not table:
                entries = self.block_tables[index, group, : len(table)]
                entries[:] = table
                np.maximum(entries, 0, out=entries)  # NO_BLOCK: nothing of it is used, but it may be fetched
        self._rows[index] = tables

    def _pack_ones(self, index: np.ndarray, at: np.ndarray, token_ids: np.ndarray, positions: np.ndarray) -> None:
        """Sequences of one token: their numbers, where they are in the step, and what they are."""
        self.token_ids[at] = token_ids
        self.positions[at] = positions
        for group, size in enumerate(self.block_sizes):
            places = positions
            if policy := self.places.get(group):
                prompts = self.prompt_lens[index].tolist()
                places = np.array([policy.place(*of) for of in zip(positions.tolist(), prompts, strict=True)])
            blocks = self.block_tables[index, group, places // size]
            self.slot_mapping[group, at] = blocks if group in self.states else blocks * size + places % size

    def _place(self, group: int, sequence: ScheduledSequence) -> int:
        """Where its first token goes; the others of a step follow."""
        policy = self.places.get(group)
        return sequence.start if policy is None else policy.place(sequence.start, sequence.prompt)

    def _pack_chunk(self, at: int, sequence: ScheduledSequence, row: int) -> None:
        start, end = sequence.start, at + len(sequence.token_ids)
        positions = np.arange(start, start + len(sequence.token_ids), dtype=np.int32)
        self.token_ids[at:end] = sequence.token_ids
        self.positions[at:end] = positions
        for group, block_size in enumerate(self.block_sizes):
            slots = self.slot_mapping[group, at:end]
            if group not in self.states:
                places = positions + (self._place(group, sequence) - start) if self.places else positions
                slots[:] = slot_of(self.block_tables[row, group], places, block_size)
                continue
            slots[:] = -1
            table, known = sequence.block_tables[group], start + sequence.num_known
            for position, block in state_places(table, start, known, block_size):
                slots[position - start] = block

"""PackedBatch: a ScheduledBatch as the int32 arrays that kernels read, allocated once."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from ..format.batch import INPUTS, MOVES_MULTIPLE, BatchArray, BatchLimits
from ..kv.places import Places
from ..kv.sequence import NO_BLOCK
from ..kv.state_group import state_places
from ..system import anonymous_map
from .padding import StepSize
from .scheduled import Draft, ScheduledBatch, ScheduledSequence

if TYPE_CHECKING:
    import numpy as np
else:
    from ..late import np

# memoryview formats of the elements; 16-bit floats as raw bits
CODES: dict[str, Literal["i", "f", "H", "b", "B"]] = {
    "i32": "i", "f32": "f", "bf16": "H", "f16": "H", "i8": "b", "u8": "B",
}  # fmt: skip


def host_arrays(arrays: Sequence[BatchArray], limits: BatchLimits) -> dict[str, np.ndarray]:
    """Zeroed arrays for the largest possible step, by name, each of its declared shape."""
    return {array.name: np.zeros(limits.shape(array), CODES[array.dtype]) for array in arrays}


def plain_arrays(arrays: Sequence[BatchArray], limits: BatchLimits) -> dict[str, memoryview[Any]]:
    """Zeroed memory for the largest step's arrays by name, as `host_arrays` but without numpy: flat views of the
    element type."""
    return {array.name: zeroed(limits.nbytes(array)).cast(CODES[array.dtype]) for array in arrays}


def zeroed(nbytes: int) -> memoryview:
    """`nbytes` bytes of zeros, at least one element; pages take memory when first touched."""
    return memoryview(anonymous_map(max(nbytes, 4)))


class PackedBatch:
    """The arrays of `INPUTS` for the largest possible step; `pack` fills their beginnings.

    In a group that holds states, slot_mapping[t] is the block that receives the state after token t, or -1. Only the
    first `ceil(context_lens[s] / block_size)` entries of a sequence's block table are valid, except those of blocks
    that were given back; logit_rows ascend. For trees of draft tokens, positions follow the depths, and a context
    length counts cache slots; parents are indices into the batch, -1 outside trees; tree_masks (64 bits) have bit i set
    if a token sees its sequence's token i, and no bit outside trees.
    """

    def __init__(
        self,
        limits: BatchLimits,
        block_sizes: Sequence[int],
        arrays: Mapping[str, Any] | None = None,
        states: Collection[int] = (),
        places: Mapping[int, Places] | None = None,
    ) -> None:
        """block_sizes: tokens per block of each KV group. arrays: contiguous buffers to use for some arrays, by name;
        others are allocated here. states: the indices of the groups that hold states. places: by index, the policies of
        the groups that evict."""
        self.limits, self.block_sizes, self.states = limits, tuple(block_sizes), frozenset(states)
        self.places = dict(places or {})
        given = arrays or {}
        self.arrays = {**given, **plain_arrays([array for array in INPUTS if array.name not in given], limits)}
        flat = {array.name: _flat(self.arrays[array.name]) for array in INPUTS}
        self._token_ids, self._positions, self._parents = flat["token_ids"], flat["positions"], flat["parents"]
        self._seq_starts, self._context_lens = flat["seq_starts"], flat["context_lens"]
        self._logit_rows, self._prompt_lens, self._tree_masks = (
            flat[name] for name in ("logit_rows", "prompt_lens", "tree_masks")
        )
        self._slots, self._moves = (_parts(flat[name], limits.groups) for name in ("slot_mapping", "moves"))
        self._tables = [_parts(row, limits.groups) for row in _parts(flat["block_tables"], limits.seqs)]
        self.num_tokens = self.num_seqs = self.num_logit_rows = self.num_moves = 0
        self.has_trees = True  # buffers from outside may hold anything
        self._rows: list[tuple[tuple[int, ...], ...] | None] = [None] * limits.seqs  # tables in block_tables

    def pack(self, batch: ScheduledBatch) -> None:
        """Fill the arrays with a batch, which must be within `limits`."""
        self.num_moves = batch.num_moves
        for group, upkeep in enumerate(batch.upkeep):
            if upkeep.moves:
                _put(self._moves[group], 0, [place for move in upkeep.moves for place in move])
        had_trees, self.has_trees = self.has_trees, any(sequence.is_tree for sequence in batch.sequences)
        if had_trees or self.has_trees:
            _fill(self._parents, 0, self.limits.tokens, -1)
            _fill(self._tree_masks, 0, len(self._tree_masks), 0)
        if self.places:
            _put(self._prompt_lens, 0, [sequence.prompt for sequence in batch.sequences])
        starts, ends, rows = [0], [], []
        token = 0
        for index, sequence in enumerate(batch.sequences):
            token_ids, start, tables, num_logits = sequence[1:5]
            count = len(token_ids)
            if self._rows[index] is not tables:  # unchanged tables are the same objects
                self._pack_tables(index, tables)
            if count == 1:
                self._pack_one(index, token, token_ids[0], sequence)
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
        self.num_tokens, self.num_seqs, self.num_logit_rows = token, len(ends), len(rows)
        _put(self._seq_starts, 0, starts)
        _put(self._context_lens, 0, ends)
        _put(self._logit_rows, 0, rows)

    def pad(self, size: StepSize) -> None:
        """Pad a step to these sizes. Added tokens have no slot, added sequences no context; added logit rows repeat the
        last token. If as many tokens as sequences are added, each added sequence has one token; otherwise the last
        sequence has all added tokens."""
        tokens, seqs, rows = self.num_tokens, self.num_seqs, self.num_logit_rows
        _fill(self._token_ids, tokens, size.tokens, 0)
        _fill(self._positions, tokens, size.tokens, 0)
        for slots in self._slots:
            _fill(slots, tokens, size.tokens, -1)
        _fill(self._context_lens, seqs, size.seqs, 0)
        if size.seqs > seqs:
            if size.tokens - tokens == size.seqs - seqs:
                _put(self._seq_starts, seqs + 1, range(tokens + 1, size.tokens))
            else:
                _fill(self._seq_starts, seqs + 1, size.seqs, tokens)
            self._seq_starts[size.seqs] = size.tokens
        _fill(self._logit_rows, rows, size.rows, tokens - 1)
        self.num_tokens, self.num_seqs, self.num_logit_rows = size

    def pad_moves(self) -> None:
        """Pad the moves to a multiple of MOVES_MULTIPLE, so that few different counts occur: the last move is repeated,
        which changes nothing."""
        have, count = self.num_moves, -(-self.num_moves // MOVES_MULTIPLE) * MOVES_MULTIPLE
        if have:
            for moves in self._moves:
                _put(moves, 2 * have, moves[2 * have - 2 : 2 * have].tolist() * (count - have))
            self.num_moves = count

    def _pack_tree(self, at: int, start: int, draft: Draft) -> None:
        """Write positions, parents and masks of the draft tokens after the token at index `at`."""
        _put(self._positions, at + 1, [start + depth for depth in draft.depths()])
        _put(self._parents, at + 1, [at + 1 + parent for parent in draft.parents])
        masks = [1]
        for guess, parent in enumerate(draft.parents, start=1):
            masks.append(masks[parent + 1] | 1 << guess)
        halves = array("Q", masks).tobytes()
        self._tree_masks[2 * at : 2 * (at + len(masks))] = memoryview(halves).cast("i")

    def _pack_tables(self, index: int, tables: tuple[tuple[int, ...], ...]) -> None:
        """Write those block tables of a sequence that have changed."""
        before = self._rows[index]
        for group, table in enumerate(tables):
            if before is None or before[group] is not table:
                # a kernel may read a block that was given back, but does not use its values
                held = table if NO_BLOCK not in table else [max(block, 0) for block in table]
                _put(self._tables[index][group], 0, held)
        self._rows[index] = tables

    def _pack_one(self, index: int, at: int, token_id: int, sequence: ScheduledSequence) -> None:
        """Write a sequence of one token: as `_pack_chunk`, but faster."""
        self._token_ids[at] = token_id
        self._positions[at] = start = sequence.start
        tables = self._tables[index]
        for group, size in enumerate(self.block_sizes):
            place = self._place(group, sequence) if self.places else start
            block = tables[group][place // size]
            self._slots[group][at] = block if group in self.states else block * size + place % size

    def _place(self, group: int, sequence: ScheduledSequence) -> int:
        """The cache position of its first token in the step; the other tokens follow it."""
        policy = self.places.get(group)
        return sequence.start if policy is None else policy.place(sequence.start, sequence.prompt)

    def _pack_chunk(self, at: int, sequence: ScheduledSequence, row: int) -> None:
        start, count = sequence.start, len(sequence.token_ids)
        _put(self._token_ids, at, sequence.token_ids)
        _put(self._positions, at, range(start, start + count))
        for group, block_size in enumerate(self.block_sizes):
            slots = self._slots[group]
            if group not in self.states:
                first = self._place(group, sequence)
                _put(slots, at, _slots_of(self._tables[row][group], first, first + count, block_size))
                continue
            _fill(slots, at, at + count, -1)
            table, known = sequence.block_tables[group], start + sequence.num_known
            for position, block in state_places(table, start, known, block_size):
                slots[at + position - start] = block


def _flat(given: Any) -> memoryview:
    """A one-dimensional int32 view of a contiguous buffer of 32-bit elements."""
    view = memoryview(given)
    return view.cast("B").cast("i") if view.nbytes else memoryview(array("i"))


def _parts(view: memoryview, count: int) -> list[memoryview]:
    """The view split into `count` equal parts."""
    size = len(view) // count
    return [view[size * number : size * (number + 1)] for number in range(count)]


def _put(view: memoryview, at: int, values: Sequence[int]) -> None:
    view[at : at + len(values)] = array("i", values)


def _fill(view: memoryview, start: int, end: int, value: int) -> None:
    if start < end:
        view[start:end] = array("i", [value]) * (end - start)


def _slots_of(table: memoryview, start: int, end: int, block_size: int) -> array[int]:
    """The slots of positions start .. end - 1, computed block by block."""
    slots: array[int] = array("i")
    while start < end:
        number, offset = divmod(start, block_size)
        length = min(block_size - offset, end - start)
        first = table[number] * block_size + offset
        slots.extend(range(first, first + length))
        start += length
    return slots

"""DeclaredRows: the inputs that a program declares, packed for a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..format.batch import BatchArray
from .scheduled import ScheduledBatch, ScheduledSequence


class DeclaredRows:
    """The arrays of `Program.inputs` for the largest possible step; `pack` fills their beginnings.

    A token has the row that its sequence gives for its position, or `fill` where it gives none. What is added to a step
    (`PackedBatch.pad`) has `fill`: outside of the last step's tokens nothing else is ever left.
    """

    def __init__(self, declared: Sequence[BatchArray], arrays: Mapping[str, Any]) -> None:
        """arrays: contiguous buffers by name, zeroed, where the device reads them."""
        self._inputs = [(array, memoryview(arrays[array.name]).cast("B")) for array in declared]
        self._given = 0  # rows that may be other than `fill`, in all arrays
        for array, view in self._inputs:
            if any(array.fill_row):
                _fill(view, array, 0, len(view) // array.row_bytes)

    def pack(self, batch: ScheduledBatch) -> None:
        """Fill the arrays with what the sequences of a step give for the tokens that run in it."""
        if not self._inputs or not (self._given or any(sequence.extras for sequence in batch.sequences)):
            return
        for array, view in self._inputs:
            _fill(view, array, 0, self._given)
            size, token = array.row_bytes, 0
            for sequence in batch.sequences:
                part = _rows(array, sequence)
                view[token * size : token * size + len(part)] = part
                token += len(sequence.token_ids)
        self._given = batch.num_tokens if any(sequence.extras for sequence in batch.sequences) else 0


def _rows(array: BatchArray, sequence: ScheduledSequence) -> bytes:
    """What a sequence gives for its tokens in a step: of the last ones perhaps nothing."""
    rows, size, start = sequence.extras.get(array.name, b""), array.row_bytes, sequence.start
    if not rows or sequence.draft is None:
        return rows[start * size : (start + len(sequence.token_ids)) * size]
    positions = [start + depth for depth in (0, *sequence.draft.depths())]
    return b"".join(rows[at * size : (at + 1) * size] or array.fill_row for at in positions)


def _fill(view: memoryview, array: BatchArray, start: int, end: int) -> None:
    """Rows start .. end - 1 as nobody gives them."""
    view[start * array.row_bytes : end * array.row_bytes] = array.fill_row * (end - start)

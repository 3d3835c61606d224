"""DeclaredRows: the inputs that a program declares, packed for a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..format.batch import BatchArray
from .scheduled import ScheduledBatch, ScheduledSequence


class DeclaredRows:
    """The arrays of `Program.inputs` for the largest possible step; `pack` fills their beginnings.

    A token gets the row that its sequence gives for its position, or `fill` if it gives none. Padding
    (`PackedBatch.pad`) has `fill` too, because all rows outside the current step's tokens are always `fill`.
    """

    def __init__(self, declared: Sequence[BatchArray], arrays: Mapping[str, Any]) -> None:
        """arrays: zeroed contiguous buffers by name, which the device reads."""
        self._inputs = [(array, memoryview(arrays[array.name]).cast("B")) for array in declared]
        self._given = 0  # number of rows, in all arrays, that may differ from `fill`
        for array, view in self._inputs:
            if any(array.fill_row):
                _fill(view, array, 0, len(view) // array.row_bytes)

    def pack(self, batch: ScheduledBatch) -> None:
        """Fill the arrays with the rows that a step's sequences give for its tokens."""
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
    """A sequence's rows for its tokens in a step; it may end early, with no rows for the last tokens."""
    rows, size, start = sequence.extras.get(array.name, b""), array.row_bytes, sequence.start
    if not rows or sequence.draft is None:
        return rows[start * size : (start + len(sequence.token_ids)) * size]
    positions = [start + depth for depth in (0, *sequence.draft.depths())]
    return b"".join(rows[at * size : (at + 1) * size] or array.fill_row for at in positions)


def _fill(view: memoryview, array: BatchArray, start: int, end: int) -> None:
    """Set rows start .. end - 1 to the fill row."""
    view[start * array.row_bytes : end * array.row_bytes] = array.fill_row * (end - start)

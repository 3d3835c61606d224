"""Inputs and outputs of a section that is asked for: rows by name, which are checked, padded and read."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import numpy as np

from ..errors import UsageError
from ..format.program import Section
from .device import Device

DTYPES = {"f32": np.dtype(np.float32), "i32": np.dtype(np.int32)}  # of the inputs and outputs of sections


class AskedSection:
    """A section that runs after a step: the facts that do not change between calls. given: the names of the outputs to
    read; None: all."""

    def __init__(self, section: Section, given: Collection[str] | None = None) -> None:
        self.name = section.name
        self._names = section.inputs.keys()
        self._inputs = [(name, a.at, DTYPES[a.dtype], tuple(a.shape)) for name, a in section.inputs.items()]
        outputs = [(n, a) for n, a in section.outputs.items() if given is None or n in given]
        self._outputs = [(n, a.at, a.row_bytes, DTYPES[a.dtype], a.shape) for n, a in outputs]

    def rows_of(self, inputs: Mapping[str, np.ndarray], most: int) -> tuple[int, list[tuple[str, np.ndarray]]]:
        """How many rows the section is asked for, and the rows `[count, ...]` for each of its input buffers, in its
        dtype.

        most: the largest allowed number of rows. UsageError for wrong names, shapes or numbers of rows.
        """
        if inputs.keys() != self._names:
            wanted, found = (", ".join(sorted(names)) or "nothing" for names in (self._names, inputs))
            raise UsageError(f"section {self.name!r} is given {wanted}, not {found}")
        given: list[tuple[str, np.ndarray]] = []
        count = -1
        for name, at, dtype, shape in self._inputs:
            rows = np.ascontiguousarray(inputs[name], dtype)
            if rows.shape[1:] != shape:
                raise UsageError(f"input {name} of section {self.name!r} has rows of {list(shape)}")
            count = len(rows) if count < 0 else count
            if len(rows) != count:
                raise UsageError(f"section {self.name!r} is asked for {count} rows and for {len(rows)}")
            given.append((at, rows))
        if not 1 <= count <= most:
            raise UsageError(f"section {self.name!r} is asked for {count} rows, not for 1 to {most}")
        return count, given

    def results(self, device: Device, tokens: int, count: int) -> Iterator[tuple[str, np.ndarray]]:
        """The section's outputs by name, [count, ..] each, for `count` rows that were asked for after a step of
        `tokens` tokens."""
        for name, at, row_bytes, dtype, shape in self._outputs:
            yield name, device.read(at, tokens, count * row_bytes).view(dtype).reshape(count, *shape)

    @staticmethod
    def padded(rows: np.ndarray, count: int) -> np.ndarray:
        """Rows `[n, ...]` padded to `[count, ...]` with copies of the first row."""
        return np.concatenate([rows, np.repeat(rows[:1], count - len(rows), 0)])

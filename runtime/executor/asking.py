"""What a section is given when it is asked for: rows by name, checked and padded."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..errors import UsageError
from ..format.program import Section, SectionArray

DTYPES = {"f32": np.dtype(np.float32), "i32": np.dtype(np.int32)}  # of what sections are given and give


def checked_rows(section: Section, inputs: Mapping[str, np.ndarray], most: int) -> tuple[int, dict[str, np.ndarray]]:
    """How many rows a section is asked for, and its inputs `[rows, ...]` in the types that it reads.

    most: how many there can be. UsageError for names, shapes or numbers of rows that it does not take.
    """
    if inputs.keys() != section.inputs.keys():
        wanted, found = (", ".join(sorted(names)) or "nothing" for names in (section.inputs, inputs))
        raise UsageError(f"section {section.name!r} is given {wanted}, not {found}")
    given = {name: np.ascontiguousarray(inputs[name], DTYPES[a.dtype]) for name, a in section.inputs.items()}
    counts = {len(rows) if rows.ndim else 0 for rows in given.values()}
    if len(counts) != 1 or not 1 <= min(counts) <= most:
        raise UsageError(f"section {section.name!r} is asked for {sorted(counts)} rows, not for 1 to {most}")
    for name, array in section.inputs.items():
        if given[name].shape[1:] != tuple(array.shape):
            raise UsageError(f"input {name} of section {section.name!r} has rows of {array.shape}")
    return counts.pop(), given


def padded(rows: np.ndarray, count: int) -> np.ndarray:
    """`count` rows, the first one again behind those that there are."""
    return np.concatenate([rows, np.repeat(rows[:1], count - len(rows), 0)]) if count > len(rows) else rows


def rows_of(array: SectionArray, count: int, content: np.ndarray) -> np.ndarray:
    """The bytes of `count` rows, as rows."""
    return content.view(DTYPES[array.dtype]).reshape(count, *array.shape)

"""icc_largest, the library's search for the largest logits, against numpy."""

from pathlib import Path

import numpy as np
import pytest
from icc.runtime.executor.cpu.library import KernelLibrary


@pytest.mark.parametrize("width", [1, 15, 16, 33, 1000])
def test_the_first_of_the_largest_is_found(width: int, ops_libraries: dict[str, Path]) -> None:
    rng = np.random.default_rng(width)
    logits = rng.integers(-5, 5, (8, width)).astype(np.float32)
    expected = logits.argmax(axis=1)
    logits[4], expected[4] = -np.inf, -1
    for row, value in zip((5, 6, 7), (np.nan, np.inf, -np.inf), strict=True):
        logits[row, rng.integers(width)] = value
    expected[5:7] = -1
    expected[7] = logits[7].argmax() if width > 1 else -1
    for isa, path in ops_libraries.items():
        library = KernelLibrary(path.read_bytes(), isa)
        assert library.largest(logits.ctypes.data, 8, width) == expected.tolist(), isa

"""Measures how fast this machine's cores read memory, which limits the speed of decoding."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from .cores import usable_cores
from .memory import available_bytes

_SIZE = 64 << 20  # bytes per thread: more than a thread's share of any cache
_ROUNDS = 3


def read_bandwidth(threads: int | None = None, nbytes: int | None = None) -> float:
    """GB/s of all threads together (default: as many as kernels get), the best of a few rounds; takes about 0.2 s.

    nbytes: how many bytes are read repeatedly, such as a model's weights; small sizes are read from a cache. None: more
    than any cache holds.
    """
    threads = threads or usable_cores()
    size = min(_SIZE if nbytes is None else nbytes // threads, _SIZE, available_bytes() // (8 * threads))
    areas = [np.ones(max(size, 1 << 20) // 8, dtype=np.int64) for _ in range(threads)]
    passes = _SIZE // areas[0].nbytes or 1  # a round reads the same number of bytes for any `nbytes`

    def read(area: np.ndarray) -> None:
        for _ in range(passes):
            area.max()  # numpy releases the GIL while it reads

    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(np.max, areas))
        for _ in range(_ROUNDS):
            start = time.perf_counter()
            list(pool.map(read, areas))
            best = max(best, passes * sum(area.nbytes for area in areas) / (time.perf_counter() - start))
    return best / 1e9

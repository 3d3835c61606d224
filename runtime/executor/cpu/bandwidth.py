"""How fast this machine's cores read memory, which is what decoding waits for."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from .cores import usable_cores
from .memory import available_bytes

_SIZE = 64 << 20  # bytes per thread: more than its share of any cache
_ROUNDS = 3


def read_bandwidth(threads: int | None = None) -> float:
    """GB/s of all threads together (default: as many as kernels get), the best of a few rounds; about 0.2 s."""
    threads = threads or usable_cores()
    size = min(_SIZE, available_bytes() // (8 * threads))
    areas = [np.ones(max(size, 1 << 20) // 8, dtype=np.int64) for _ in range(threads)]
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(np.max, areas))  # numpy gives the GIL back while it reads
        for _ in range(_ROUNDS):
            start = time.perf_counter()
            list(pool.map(np.max, areas))
            best = max(best, sum(area.nbytes for area in areas) / (time.perf_counter() - start))
    return best / 1e9

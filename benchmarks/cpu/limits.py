"""This machine's measured limits (read bandwidth, int8 and float peak), which bound every speed in this folder.

python benchmarks/cpu/limits.py
"""

from __future__ import annotations

import ctypes
import functools
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

_BYTES = 768 << 20  # far beyond any cache
_STREAMS = ((4, 0), (8, 0), (4, 2048), (8, 2048))  # (streams per thread, bytes of prefetch ahead)


@dataclass(frozen=True)
class Limits:
    """read: bytes/s; int8 and fp32: operations/s, a multiplication and an addition being two."""

    threads: int
    read: float
    int8: float
    fp32: float


@functools.cache
def _library(flags: str) -> ctypes.CDLL:
    folder = Path(tempfile.mkdtemp())
    source = Path(__file__).with_name("limits.cpp")
    subprocess.run(
        ["g++", "-O3", *flags.split(), "-shared", "-fPIC", "-pthread", str(source), "-o", str(folder / "limits.so")],
        check=True,
    )
    library = ctypes.CDLL(str(folder / "limits.so"))
    library.read_rate.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_int)
    for function in (library.read_rate, library.int8_rate, library.float_rate):
        function.restype = ctypes.c_double
    return library


@functools.cache
def _memory() -> np.ndarray:
    raw = np.ones(_BYTES + (2 << 20), np.uint8)
    start = -raw.ctypes.data % (2 << 20)
    return raw[start : start + _BYTES]


def read_bandwidth(threads: int) -> float:
    """Bytes/s of the best of several access patterns, with one pass each."""
    library, memory = _library("-march=native"), _memory()
    return max(library.read_rate(threads, memory.ctypes.data, memory.size, *pattern) for pattern in _STREAMS)


def limits(threads: int, flags: str = "-march=native") -> Limits:
    """Measure all limits, each the best of three; `flags` choose the instruction set of the arithmetic peaks."""
    library = _library(flags)
    int8, fp32 = (max(rate(threads) for _ in range(3)) for rate in (library.int8_rate, library.float_rate))
    return Limits(threads, max(read_bandwidth(threads) for _ in range(3)), int8, fp32)


if __name__ == "__main__":
    for isa in ("-march=native", "-mavx2 -mfma"):
        for count in (1, 2):
            print(isa, {k: f"{v:.4g}" for k, v in asdict(limits(count, isa)).items()})

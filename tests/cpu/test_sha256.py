"""The libraries' SHA-256, which checks weights, against hashlib's."""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
from pathlib import Path

import numpy as np
import pytest
from icc.compiler.backends.cpu.isa import AVX2
from icc.compiler.backends.render import TEMPLATES
from icc.runtime.executor.cpu.library import KernelLibrary


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 16, 17, 33])
@pytest.mark.parametrize("size", [64, 128, 4096])
def test_as_hashlib(ops_libraries: dict[str, Path], size: int, count: int) -> None:
    data = np.random.default_rng(size + count).integers(0, 256, size * count + 1, dtype=np.uint8).tobytes()
    pieces = memoryview(data)[1:]  # of any alignment
    expected = [hashlib.sha256(pieces[at : at + size]).hexdigest() for at in range(0, len(pieces), size)]
    for isa, path in ops_libraries.items():
        assert KernelLibrary(path.read_bytes(), isa).sha256(pieces, size) == expected, isa


def test_as_hashlib_where_the_cpu_has_no_instructions_for_it(tmp_path: Path) -> None:
    source = (
        '#include "simd.h"\n#include "sha256.h"\nextern "C" void hash(const uint8_t* data, int64_t count, int64_t size,'
    )
    (tmp_path / "a.cpp").write_text(source + " uint8_t (*digests)[32]) { sha256_pieces(data, count, size, digests); }")
    flags = ["-std=c++17", "-O1", "-w", "-fPIC", "-shared", "-DICC_SHA_LANES", *AVX2.flags, f"-I{TEMPLATES / 'cpp'}"]
    subprocess.run(["g++", *flags, "a.cpp", "-o", "a.so"], cwd=tmp_path, check=True)
    count, size = 11, 192
    data, found = bytes(range(192)) * count, (ctypes.c_char * (32 * count))()
    ctypes.CDLL(str(tmp_path / "a.so")).hash(data, ctypes.c_int64(count), ctypes.c_int64(size), found)
    assert found.raw == hashlib.sha256(data[:size]).digest() * count


@pytest.mark.soak
def test_a_length_of_more_than_32_bits(ops_libraries: dict[str, Path]) -> None:
    """The number of bits of a piece of 512 MiB and more does not fit one word of the last block."""
    data = bytes((512 << 20) + 64)
    isa, path = next(iter(ops_libraries.items()))
    found = KernelLibrary(path.read_bytes(), isa).sha256(memoryview(data), len(data))
    assert found == [hashlib.sha256(data).hexdigest()]

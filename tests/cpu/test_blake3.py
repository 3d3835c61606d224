"""The libraries' BLAKE3, which checks weights, against the digests of the reference implementation."""

from __future__ import annotations

from ctypes import c_char, c_int64
from pathlib import Path

import pytest
from icc.runtime.executor.cpu.library import KernelLibrary

# BLAKE3's own test vectors have this input, and some of these lengths. Made by the package blake3 1.0.11.
INPUT = bytes(i % 251 for i in range(4 << 20))
DIGESTS = {
    1: "2d3adedff11b61f14c886e35afa036736dcd87a74d27b5c1510225d0f592e213",
    64: "4eed7141ea4a5cd4b788606bd23f46e212af9cacebacdc7d1f4c6dc7f2511b98",
    65: "de1e5fa0be70df6d2be8fffd0e99ceaa8eb6e8c93a63f2d8d1c30ecb6b263dee",
    1023: "10108970eeda3eb932baac1428c7a2163b0e924c9a9e25b35bba72b28f70bd11",
    1024: "42214739f095a406f3fc83deb889744ac00df831c10daa55189b5d121c855af7",
    1025: "d00278ae47eb27b34faecf67b4fe263f82d5412916c1ffd97c8cb7fb814b8444",
    2048: "e776b6028c7cd22a4d0ba182a8bf62205d2ef576467e838ed6f2529b85fba24a",
    3072: "b98cb0ff3623be03326b373de6b9095218513e64f1ee2edd2525c7ad1e5cffd2",
    5121: "628bd2cb2004694adaab7bbd778a25df25c47b9d4155a55f8fbd79f2fe154cff",
    16384: "f875d6646de28985646f34ee13be9a576fd515f76b5b0a26bb324735041ddde4",
    31751: "c40b37349bf136062d9b600390005e60f06d397359930c0c32e44bf819a74bbc",
    32768: "162183d1f9184474f5a5c9e6224e66720cdb6523f822e52d9b1efa30893f48f9",
    33792: "2e87991ba4054e53240ccea4ee7eb6f6b24c366c8dfe8e52306026918870c229",
    67560: "b7583381f539868a1d3212265b8f9246724d5a4562c0680142d0e411efeccb02",
    102400: "bc3e3d41a1146b069abffad3c0d44860cf664390afce4d9661f7902e7943e085",
    1048577: "2f053cd7472cf0cd2f9adaf45c1180255b91b9a865404a63671a0ee5f792ed33",
    4194304: "4e94e6f582581a0f3855f3ce504b153e951e65036fe9e2f010b7e25473c54f98",
}


def digests(path: Path, content: memoryview, size: int, first: int = 0) -> list[str]:
    """The digests of all chunks of `size` bytes of the content, from chunk `first` on."""
    count = -(-len(content) // size)
    found = (c_char * (32 * count))()
    KernelLibrary(path.read_bytes(), path.name).digest_pieces(content, size, c_int64(first), found)
    return [found.raw[at : at + 32].hex() for at in range(0, 32 * count, 32)]


@pytest.mark.parametrize("length", DIGESTS)
def test_as_the_reference(ops_libraries: dict[str, Path], length: int) -> None:
    content = memoryview(b"." + INPUT)[1 : length + 1]  # at an odd address
    for path in ops_libraries.values():
        assert digests(path, content, 4 << 20) == [DIGESTS[length]], path


def test_pieces_that_others_take_are_left_out(ops_libraries: dict[str, Path]) -> None:
    content = memoryview(INPUT[:1024] + INPUT[:1024] + INPUT[:65])
    for path in ops_libraries.values():
        assert digests(path, content, 1024, first=1) == ["00" * 32, DIGESTS[1024], DIGESTS[65]]

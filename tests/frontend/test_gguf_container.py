"""GGUF headers: their content is read, and any fault is a one-line error before anything is allocated for it."""

from __future__ import annotations

import struct
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from gguf_bytes import ARCH, GOOD, WEIGHT, header, padded, pair, tensor, text
from icc.compiler.errors import CheckpointError
from icc.compiler.frontend.source.gguf.split import open_container
from icc.runtime.format.gguf import MAX_HEADER, read_container


def read(path: Path, content: bytes):
    path.write_bytes(content)
    return read_container(path)


def test_what_is_read(tmp_path: Path) -> None:
    pairs = [
        ARCH,
        pair("count", 4, struct.pack("<I", 7)),
        pair("eps", 6, struct.pack("<f", 0.5)),
        pair("flag", 7, b"\1"),
        pair("tokens", 9, struct.pack("<IQ", 8, 2) + text("a") + text("é")),
        pair("kinds", 9, struct.pack("<IQ", 5, 3) + struct.pack("<3i", 1, -2, 3)),
    ]
    found = read(tmp_path / "a", padded(header(pairs, [WEIGHT, tensor("v", (3,), 0, 64)]), bytes(128)))
    facts = {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in found.metadata.items()}
    assert facts == {
        "general.architecture": "llama", "count": 7, "eps": 0.5, "flag": True, "tokens": ["a", "é"],
        "kinds": [1, -2, 3],
    }  # fmt: skip
    weight, vector = found.tensors.values()
    assert (weight.shape, weight.kind, weight.end - weight.start) == ((2, 32), "q4_0", 36)
    assert (vector.shape, vector.kind, vector.start - weight.start) == ((3,), "f32", 64)


HUGE = 2**63
WRONG = {
    "no file at all": (b"", "truncated"),
    "magic": (padded(header([ARCH], [WEIGHT], magic=b"GGML"), bytes(64)), "not a GGUF file"),
    "version": (header([], [], version=1) + bytes(64), "version 1"),
    "order of bytes": (header([], [], version=3 << 24) + bytes(64), "big-endian"),
    "pair count": (header([ARCH], [WEIGHT], pairs=HUGE), "metadata pairs would end behind the end of the file"),
    "tensor count": (header([ARCH], [WEIGHT], tensors=HUGE), "tensors would end behind the end of the file"),
    "one pair too many": (header([ARCH], [], pairs=2) + bytes(12), "would end behind the end"),
    "length of a key": (header([struct.pack("<Q", HUGE) + bytes(64)], []), "a metadata key has 9223372036854775808"),
    "length of a text": (header([pair("a", 8, struct.pack("<Q", 2**40))], []) + bytes(64), "metadata 'a'"),
    "utf-8": (header([pair("a", 8, text(b"\xff"))], []) + bytes(64), "not UTF-8"),
    "kind of a value": (header([pair("a", 13, bytes(8))], []) + bytes(64), "unknown type 13"),
    "kind of an array": (header([pair("a", 9, struct.pack("<IQ", 9, 1) + bytes(64))], []), "array of type 9"),
    "length of an array": (header([pair("a", 9, struct.pack("<IQ", 12, 2**60))], []) + bytes(64), "values of 'a'"),
    "length of texts": (header([pair("a", 9, struct.pack("<IQ", 8, 2**60))], []) + bytes(64), "strings of 'a'"),
    "truth": (header([pair("a", 7, b"\2")], []) + bytes(64), "neither true nor false"),
    "a key twice": (header([ARCH, ARCH], []) + bytes(64), "there twice"),
    "dimensions": (header([], [tensor("w", (1,) * 5, 0, 0)]) + bytes(64), "5 dimensions"),
    "shape": (padded(header([], [tensor("w", (2**62, 2**62), 0, 0)]), bytes(64)), "tensor 'w' is at bytes"),
    "blocks": (padded(header([], [tensor("w", (2, 33), 2, 0)]), bytes(64)), r"q4_0 has shape \[2, 33\]"),
    "no values": (padded(header([], [tensor("w", (0, 32), 0, 0)]), bytes(64)), r"shape \[0, 32\]"),
    "removed type": (padded(header([], [tensor("w", (2, 32), 31, 0)]), bytes(64)), "Q4_0_4_4, which llama.cpp has"),
    "type": (padded(header([], [tensor("w", (2, 32), 99, 0)]), bytes(64)), "unknown type 99"),
    "place": (padded(header([], [tensor("w", (2, 32), 2, 64)]), bytes(64)), "the file has"),
    "far place": (padded(header([], [tensor("w", (2, 32), 2, 2**63)]), bytes(64)), "the file has"),
    "odd place": (padded(header([], [tensor("w", (2, 32), 2, 3)]), bytes(64)), "is at bytes"),
    "overlap": (padded(header([], [WEIGHT, tensor("v", (3,), 0, 32)]), bytes(64)), "'w' and 'v' overlap"),
    "a tensor twice": (padded(header([], [WEIGHT, tensor("w", (3,), 0, 64)]), bytes(128)), "'w' is there twice"),
    "alignment": (header([pair("general.alignment", 4, struct.pack("<I", 24))], []) + bytes(64), "alignment is 24"),
    "kind of alignment": (header([pair("general.alignment", 8, text("32"))], []) + bytes(64), "alignment is '32'"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_said(what: str, tmp_path: Path) -> None:
    content, words = WRONG[what]
    with pytest.raises(CheckpointError, match=words) as caught:
        read(tmp_path / "a.gguf", content)
    assert "\n" not in str(caught.value)


def test_a_header_of_a_gigabyte_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(header([pair("a", 9, struct.pack("<IQ", 0, 2**30))], []))
    with path.open("r+b") as file:
        file.truncate(2**30 + 4096)  # sparse: never read
    tracemalloc.start()
    with pytest.raises(CheckpointError, match=f"header larger than {MAX_HEADER} bytes"):
        read_container(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_any_bytes_are_read_or_refused(tmp_path: Path) -> None:
    """Every prefix, and every byte of the header changed: the only error is CheckpointError; tests/fuzz tries more."""
    size, path = len(GOOD) - 64, tmp_path / "a.gguf"
    mutants = [GOOD[:end] for end in range(size)]
    for at in range(size):
        mutants += [GOOD[:at] + bytes([GOOD[at] ^ flip]) + GOOD[at + 1 :] for flip in (1, 0x80, 0xFF)]
    tracemalloc.start()
    for content in mutants:
        path.write_bytes(content)
        try:
            found = read_container(path)
        except CheckpointError:
            continue
        assert all(0 <= t.start <= t.end <= len(content) for t in found.tensors.values())
    assert tracemalloc.get_traced_memory()[1] < 2 << 20
    tracemalloc.stop()


def split(folder: Path, number: int, count: int, tensors: list[bytes], total: int = 2) -> Path:
    pairs = [
        pair("split.no", 2, struct.pack("<H", number)),
        pair("split.count", 2, struct.pack("<H", count)),
        pair("split.tensors.count", 5, struct.pack("<i", total)),
    ]
    path = folder / f"m-{number + 1:05}-of-{count:05}.gguf"
    path.write_bytes(padded(header([ARCH, *pairs] if number == 0 else pairs, tensors), bytes(64)))
    return path


def test_a_model_in_several_files(tmp_path: Path) -> None:
    first = split(tmp_path, 0, 2, [WEIGHT])
    with pytest.raises(CheckpointError, match=r"m-00002-of-00002\.gguf is missing"):
        open_container(first)
    second = split(tmp_path, 1, 2, [tensor("v", (3,), 0, 0)])
    for path in (first, second):
        found = open_container(path)
        assert list(found.tensors) == ["w", "v"] and found.metadata["general.architecture"] == "llama"
        assert found.tensors["v"].path == second
    split(tmp_path, 1, 2, [WEIGHT])
    with pytest.raises(CheckpointError, match="also in another file"):
        open_container(first)
    split(tmp_path, 1, 2, [])
    with pytest.raises(CheckpointError, match="have 1 tensors, not 2"):
        open_container(first)
    with pytest.raises(CheckpointError, match="not named so"):
        open_container(first.rename(tmp_path / "m.gguf"))

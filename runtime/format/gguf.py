"""Reads the header of a GGUF file: metadata and tensor entries, checked against the file's size before use.

Layout of the format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import CheckpointError

MAX_HEADER = 100_000_000
_MAX_NAME, _MAX_KEY, _MAX_DIMS = 64 * 4, 65535, 4
_LONGEST = 400  # characters of an error text, which may quote names from the file
_HINT = "the file is damaged: download it again"
_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: np.dtype("u1"), 1: np.dtype("i1"), 2: np.dtype("<u2"), 3: np.dtype("<i2"), 4: np.dtype("<u4"),
    5: np.dtype("<i4"), 6: np.dtype("<f4"), 7: np.dtype("?"), 10: np.dtype("<u8"), 11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}  # fmt: skip
# type number in the file: name, values per block, bytes per block
TYPES: dict[int, tuple[str, int, int]] = {
    0: ("f32", 1, 4), 1: ("f16", 1, 2), 2: ("q4_0", 32, 18), 3: ("q4_1", 32, 20), 6: ("q5_0", 32, 22),
    7: ("q5_1", 32, 24), 8: ("q8_0", 32, 34), 9: ("q8_1", 32, 36), 10: ("q2_k", 256, 84), 11: ("q3_k", 256, 110),
    12: ("q4_k", 256, 144), 13: ("q5_k", 256, 176), 14: ("q6_k", 256, 210), 15: ("q8_k", 256, 292),
    16: ("iq2_xxs", 256, 66), 17: ("iq2_xs", 256, 74), 18: ("iq3_xxs", 256, 98), 19: ("iq1_s", 256, 50),
    20: ("iq4_nl", 32, 18), 21: ("iq3_s", 256, 110), 22: ("iq2_s", 256, 82), 23: ("iq4_xs", 256, 136),
    24: ("i8", 1, 1), 25: ("i16", 1, 2), 26: ("i32", 1, 4), 27: ("i64", 1, 8), 28: ("f64", 1, 8),
    29: ("iq1_m", 256, 56), 30: ("bf16", 1, 2), 34: ("tq1_0", 256, 54), 35: ("tq2_0", 256, 66),
    39: ("mxfp4", 32, 17), 40: ("nvfp4", 64, 36), 41: ("q1_0", 128, 18),
}  # fmt: skip


_REMOVED = {  # llama.cpp's repacked types: the same values, ordered for one machine's instructions
    31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8",
}  # fmt: skip


@dataclass(frozen=True)
class GgufTensor:
    """One tensor: `shape` with the outermost axis first, `kind` a name of TYPES, at bytes [start, end) of the file."""

    name: str
    path: Path
    start: int
    end: int
    shape: tuple[int, ...]
    kind: str


@dataclass(frozen=True)
class GgufContainer:
    """The metadata and the tensors of one file, or of all files of a split model.

    Arrays of numbers are numpy arrays, arrays of strings are lists. used: keys that `read_config` has read.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]
    used: set[str] = field(default_factory=set, compare=False)

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """The value of a key, `default` if there is none. CheckpointError if the value is of another kind."""
        found = self.metadata.get(key, default)
        if found is not default and not isinstance(found, kind):
            raise CheckpointError(f"{self.path}: metadata {key!r} is {type(found).__name__}", _HINT)
        return found


def is_gguf(path: Path) -> bool:
    """Whether a path is a file that begins with GGUF's magic bytes, or whose name ends in .gguf."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return path.suffix == ".gguf" or file.read(4) == b"GGUF"


def read_container(path: Path) -> GgufContainer:
    """Read and check the header of one file; CheckpointError says what is wrong with it."""
    size = path.stat().st_size
    if size < 24:
        raise CheckpointError(f"{path} is truncated or not a GGUF file: it has {size} bytes", _HINT)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return _HeaderReader(path, content, size).run()


class _HeaderReader:
    """A cursor over the header. No count from the file is used before it is known to fit the rest of the file."""

    def __init__(self, path: Path, content: mmap.mmap, size: int) -> None:
        self.path, self.content, self.size = path, content, size
        self.end = min(size, MAX_HEADER)
        self.at = 0

    def run(self) -> GgufContainer:
        magic, version = self._take(4, "the magic"), self._number("<I", "the version")
        if magic != b"GGUF":
            raise CheckpointError(f"{self.path} is not a GGUF file: it begins with {magic!r}", _HINT)
        if version & 0xFFFF == 0:
            raise CheckpointError(f"{self.path} is a big-endian GGUF file", "icc reads little-endian ones")
        if version not in (2, 3):
            raise CheckpointError(f"{self.path} is GGUF version {version}; icc reads versions 2 and 3")
        tensors, pairs = self._number("<Q", "the tensor count"), self._number("<Q", "the metadata count")
        self._fits(pairs, 13, "metadata pairs")
        self._fits(tensors, 32, "tensors")
        metadata = self._metadata(pairs)
        entries = [self._tensor(index) for index in range(tensors)]
        return GgufContainer(self.path, metadata, self._placed(metadata, entries))

    # metadata

    def _metadata(self, count: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for _ in range(count):
            key = self._string("a metadata key", _MAX_KEY)
            if key in found:
                raise self._error(f"metadata {key!r} is there twice")
            found[key] = self._value(key, self._number("<I", f"the type of {key!r}"))
        return found

    def _value(self, key: str, kind: int) -> Any:
        if kind in _SCALARS:
            return self._numbers(key, kind, 1)[0].item()
        if kind == _STRING:
            return self._string(f"metadata {key!r}")
        if kind != _ARRAY:
            raise self._error(f"metadata {key!r} has the unknown type {kind}")
        inner, count = self._number("<I", f"the type of {key!r}"), self._number("<Q", f"the length of {key!r}")
        if inner in _SCALARS:
            return self._numbers(key, inner, count)
        if inner != _STRING:
            raise self._error(f"metadata {key!r} is an array of type {inner}, which icc does not read")
        self._fits(count, 8, f"strings of {key!r}")
        return [self._string(f"metadata {key!r}") for _ in range(count)]

    def _numbers(self, key: str, kind: int, count: int) -> np.ndarray:
        dtype = _SCALARS[kind]
        self._fits(count, dtype.itemsize, f"values of {key!r}")
        raw = np.frombuffer(self._take(count * dtype.itemsize, f"metadata {key!r}"), np.uint8)
        if kind == 7 and raw.size and raw.max() > 1:
            raise self._error(f"metadata {key!r} is neither true nor false")
        return raw.view(dtype)

    # tensors

    def _tensor(self, index: int) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string(f"the name of tensor {index}", _MAX_NAME)
        dims = self._number("<I", f"the dimensions of {name!r}")
        if dims > _MAX_DIMS:
            raise self._error(f"tensor {name!r} has {dims} dimensions; there are at most {_MAX_DIMS}")
        shape = tuple(self._number("<Q", f"the shape of {name!r}") for _ in range(dims))[::-1]
        kind, offset = self._number("<I", f"the type of {name!r}"), self._number("<Q", f"the offset of {name!r}")
        if kind in _REMOVED:
            plain = _REMOVED[kind][:-4]
            raise self._error(
                f"tensor {name!r} is {_REMOVED[kind]}, which llama.cpp has removed", f"take the model's {plain} file"
            )
        if kind not in TYPES:
            raise self._error(f"tensor {name!r} has the unknown type {kind}", "it may need a newer icc")
        return name, shape, kind, offset

    def _placed(self, metadata: dict[str, Any], entries: list[tuple[str, tuple[int, ...], int, int]]) -> dict[str, Any]:
        unit = metadata.get("general.alignment", 32)
        if type(unit) is not int or not 8 <= unit <= 1 << 20 or unit & (unit - 1):
            raise self._error(f"general.alignment is {unit!r}")
        begin = -(-self.at // unit) * unit
        found: dict[str, GgufTensor] = {}
        for name, shape, kind, offset in entries:
            label, block, block_bytes = TYPES[kind]
            columns = shape[-1] if shape else 1
            if columns % block or min(shape, default=1) < 1:
                raise self._error(f"tensor {name!r} of type {label} has shape {list(shape)}")
            start, nbytes = begin + offset, prod(shape) // block * block_bytes
            if offset % unit or start + nbytes > self.size:
                raise self._error(f"tensor {name!r} is at bytes {start} to {start + nbytes}, the file has {self.size}")
            if name in found:
                raise self._error(f"tensor {name!r} is there twice")
            found[name] = GgufTensor(name, self.path, start, start + nbytes, shape, label)
        in_order = sorted(found.values(), key=lambda entry: entry.start)
        for one, two in pairwise(in_order):
            if two.start < one.end:
                raise self._error(f"tensors {one.name!r} and {two.name!r} overlap")
        return found

    # bytes

    def _error(self, problem: str, hint: str = _HINT) -> CheckpointError:
        return CheckpointError(f"{self.path}: {problem[:_LONGEST]}", hint)

    def _fits(self, count: int, each: int, what: str) -> None:
        """Raise CheckpointError unless `count` items of at least `each` bytes fit the rest of the file."""
        if count * each > self.end - self.at:
            raise self._beyond(f"{count} {what}")

    def _beyond(self, what: str) -> CheckpointError:
        if self.size > MAX_HEADER:
            return self._error(f"{what} would make the header larger than {MAX_HEADER} bytes")
        return self._error(f"{what} would end behind the end of the file, which has {self.size} bytes")

    def _take(self, count: int, what: str) -> bytes:
        if count > self.end - self.at:
            raise self._beyond(what)
        self.at += count
        return self.content[self.at - count : self.at]

    def _number(self, layout: str, what: str) -> int:
        return struct.unpack(layout, self._take(struct.calcsize(layout), what))[0]

    def _string(self, what: str, longest: int = MAX_HEADER) -> str:
        length = self._number("<Q", what)
        if length > longest:
            raise self._error(f"{what} has {length} bytes")
        try:
            return self._take(length, what).decode("utf-8")
        except UnicodeDecodeError:
            raise self._error(f"{what} is not UTF-8") from None


def join(parts: Iterable[GgufContainer]) -> GgufContainer:
    """Join the files of a split model, in order, into one container; CheckpointError if they do not belong together."""
    first, *rest = parts
    tensors = dict(first.tensors)
    for part in rest:
        if twice := sorted(tensors.keys() & part.tensors.keys()):
            raise CheckpointError(f"{part.path}: tensor {twice[0]!r} is also in another file of the model", _HINT)
        tensors |= part.tensors
    wanted = first.get("split.tensors.count", int)
    if wanted is not None and wanted != len(tensors):
        raise CheckpointError(f"{first.path}: the files of the model have {len(tensors)} tensors, not {wanted}", _HINT)
    return GgufContainer(first.path, first.metadata, tensors)

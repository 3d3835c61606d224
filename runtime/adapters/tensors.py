"""The tensors of an adapter: a safetensors file, which is not trusted, as float32 arrays."""

from __future__ import annotations

from math import prod
from pathlib import Path

import msgspec
import numpy as np

from ..errors import AdapterError
from ..format.bfloat16 import bf16_values
from .files import read_file

MAX_HEADER = 32 << 20
MAX_TENSORS = 100_000
MAX_NAME = 512  # characters
_DTYPES = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2"), "F64": np.dtype("<f8")}


class TensorEntry(msgspec.Struct, frozen=True):
    """A tensor's entry in the header; offsets in bytes from the end of the header."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class AdapterTensors:
    """The tensors of one file by name. `raw` is all of the file."""

    def __init__(self, path: Path) -> None:
        """AdapterError if the file cannot be read or its header is wrong."""
        self.path = path
        self.raw = read_file(path)
        size = int.from_bytes(self.raw[:8], "little")
        if len(self.raw) < 8 or size > min(len(self.raw) - 8, MAX_HEADER):
            raise self._damaged("its header is longer than the file, or than 32 MiB")
        self._start = 8 + size
        try:
            header = msgspec.json.decode(self.raw[8 : self._start], type=dict[str, msgspec.Raw])
            header.pop("__metadata__", None)
            if len(header) > MAX_TENSORS:
                raise self._damaged(f"it has {len(header)} tensors, more than {MAX_TENSORS}")
            self._entries = {name: msgspec.json.decode(entry, type=TensorEntry) for name, entry in header.items()}
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise self._damaged(f"its header is not valid: {error}") from None
        for name, entry in self._entries.items():
            self._check(name, entry)
        self._check_order()

    @property
    def names(self) -> list[str]:
        """The names of all tensors in the file."""
        return list(self._entries)

    def load(self, name: str) -> np.ndarray:
        """One tensor as float32, in the shape that the header states. AdapterError if a value is not finite."""
        entry = self._entries[name]
        dtype, (first, _) = _DTYPES[entry.dtype], entry.data_offsets
        found = np.frombuffer(self.raw, dtype, prod(entry.shape), self._start + first).reshape(entry.shape)
        if entry.dtype == "BF16":
            found = bf16_values(found)
        with np.errstate(over="ignore"):  # float64 values; refused below
            values = found.astype(np.float32)
        if not np.isfinite(values).all():
            raise self._damaged(f"tensor {name!r} has values that are not finite")
        return values

    def _check(self, name: str, entry: TensorEntry) -> None:
        if len(name) > MAX_NAME:
            raise self._damaged(f"a tensor has a name of {len(name)} characters, which begins with {name[:40]!r}")
        if entry.dtype not in _DTYPES:
            raise self._damaged(f"tensor {name!r} is of type {entry.dtype}, not {', '.join(_DTYPES)}")
        if min(entry.shape, default=0) < 0 or len(entry.shape) > 4:
            raise self._damaged(f"tensor {name!r} has the shape {entry.shape}")
        first, last = entry.data_offsets
        length = prod(entry.shape) * _DTYPES[entry.dtype].itemsize
        if not 0 <= first <= last <= len(self.raw) - self._start or last - first != length:
            raise self._damaged(f"tensor {name!r} is not {length} bytes of it")

    def _check_order(self) -> None:
        """Check that each byte belongs to exactly one tensor, as the format requires: many tensors that share bytes
        could fill the memory, and of two with the same name the first would be lost."""
        end = 0
        for name, entry in sorted(self._entries.items(), key=lambda item: item[1].data_offsets):
            if entry.data_offsets[0] != end:
                raise self._damaged(f"tensor {name!r} does not begin where the one before it ends")
            end = entry.data_offsets[1]
        if end != len(self.raw) - self._start:
            raise self._damaged(f"its last {len(self.raw) - self._start - end} bytes belong to no tensor")

    def _damaged(self, reason: str) -> AdapterError:
        return AdapterError(f"{self.path}: {reason}", "download it again")

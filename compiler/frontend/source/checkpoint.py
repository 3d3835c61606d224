"""Hugging Face checkpoint directories: the names and places of their tensors, checked before any tensor is read.

Tensors are lazy: `CheckpointTensor.load` returns a view of the mapped file. Pickle is never read.
"""

from __future__ import annotations

import functools
import json
import math
import mmap
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import CheckpointError, TensorError
from ...weights.handles import Constant, Weight
from .shards import INDEX, weight_files

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,  # codes: float8.py reads them with their scales
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I16": torch.int16,  # from here: dtypes of tensors that models do not read, but checkpoints may have
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "C64": torch.complex64,
}
_MAX_HEADER = 100_000_000


def mapped(path: Path) -> Tensor:
    """The whole file as uint8 [bytes], mapped copy-on-write so that torch accepts it; nothing is read until it is
    used."""
    now = path.stat()
    return _mapped(path, (now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns))


@functools.lru_cache(maxsize=64)
def _mapped(path: Path, which: tuple[int, ...]) -> Tensor:
    """A mapped file, as uint8 [bytes]. which: identifies the file now at the path, so that a new file is mapped
    again."""
    with path.open("rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    return torch.frombuffer(mapping, dtype=torch.uint8)


@dataclass
class CheckpointTensor(Weight):
    """One tensor of a safetensors file, at bytes [start, end)."""

    name: str
    path: Path
    start: int
    end: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    checked: bool = field(default=False, compare=False)

    def load(self) -> Tensor:
        """The tensor in its own dtype and `shape`, a view of the mapped file."""
        raw = mapped(self.path)[self.start : self.end]
        if self.start % self.dtype.itemsize:
            raw = raw.clone()
        value = raw.view(self.dtype).view(self.shape)
        if not self.checked:
            self._check_finite(value)
            self.checked = True
        return value

    def _check_finite(self, value: Tensor) -> None:
        if not value.is_floating_point() or value.dtype.itemsize == 1 or value.numel() == 0:
            return
        low, high = (float(v) for v in torch.aminmax(value))
        if not (math.isfinite(low) and math.isfinite(high)):
            kind = "NaN" if math.isnan(low) or math.isnan(high) else "Inf"
            raise TensorError(self.name, f"holds {kind} ({self.path.name})", "the checkpoint is damaged")


def as_bytes(weight: Weight) -> Weight:
    """A stored tensor of any dtype as bytes, uint8 [n]."""
    if isinstance(weight, CheckpointTensor):
        return replace(weight, shape=(weight.end - weight.start,), dtype=torch.uint8)
    return Constant(weight.load().contiguous().reshape(-1).view(torch.uint8))


def open_checkpoint(model_dir: Path) -> dict[str, CheckpointTensor]:
    """All tensors of a checkpoint directory, by name. CheckpointError names the file that is missing or damaged,
    TensorError the tensor that no file has."""
    files, names = weight_files(model_dir)
    tensors = {name: tensor for path in files for name, tensor in _read_header(path).items()}
    missing = sorted(set(names or ()) - set(tensors))
    if missing:
        raise TensorError(missing[0], f"is listed in {INDEX} but is in no shard", "download the checkpoint again")
    return tensors if names is None else {name: tensors[name] for name in names}


def _read_header(path: Path) -> dict[str, CheckpointTensor]:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(_MAX_HEADER, size - 8):
            raise CheckpointError(f"{path} is truncated or not a safetensors file", "download the checkpoint again")
        text = file.read(length)
    try:
        header: dict[str, Any] = json.loads(text)
        header.pop("__metadata__", None)
        tensors = {name: _tensor(path, name, entry, 8 + length) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: malformed safetensors header: {error}") from error
    for tensor in tensors.values():
        if tensor.end > size:
            raise CheckpointError(
                f"{path} is truncated: tensor {tensor.name!r} ends at byte {tensor.end}, the file at {size}",
                "download the checkpoint again",
            )
    return tensors


def _tensor(path: Path, name: str, entry: dict[str, Any], base: int) -> CheckpointTensor:
    if entry["dtype"] not in _DTYPES:
        raise CheckpointError(f"{path}: tensor {name!r} has dtype {entry['dtype']!r}, which icc does not read")
    dtype = _DTYPES[entry["dtype"]]
    shape = tuple(int(s) for s in entry["shape"])
    start, end = (int(o) for o in entry["data_offsets"])
    if start < 0 or end - start != math.prod(shape) * dtype.itemsize:
        raise CheckpointError(f"{path}: tensor {name!r} has {end - start} bytes for shape {list(shape)} {dtype}")
    return CheckpointTensor(name, path, base + start, base + end, shape, dtype)

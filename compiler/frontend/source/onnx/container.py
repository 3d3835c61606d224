"""Reads an ONNX file: its graph, and its tensors as handles. Its numbers are checked before they are used to allocate
memory."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from onnx import GraphProto, ModelProto, NodeProto, TensorProto
from onnx.defs import onnx_opset_version
from torch import Tensor

from ....errors import CheckpointError, TensorError, UnsupportedModel
from ....weights.handles import Weight
from ..checkpoint import mapped

_OLDEST = 7  # the first opset with today's broadcasting
_LIMIT = 1 << 31  # most bytes of a protobuf message
DTYPES: dict[int, torch.dtype] = {
    TensorProto.FLOAT: torch.float32,
    TensorProto.DOUBLE: torch.float64,
    TensorProto.FLOAT16: torch.float16,
    TensorProto.BFLOAT16: torch.bfloat16,
    TensorProto.FLOAT8E4M3FN: torch.float8_e4m3fn,
    TensorProto.INT64: torch.int64,
    TensorProto.INT32: torch.int32,
    TensorProto.INT16: torch.int16,
    TensorProto.INT8: torch.int8,
    TensorProto.UINT8: torch.uint8,
    TensorProto.BOOL: torch.bool,
}
_HALVES: dict[int, bool] = {TensorProto.UINT4: False, TensorProto.INT4: True}  # two per byte; whether they are signed
_FIELDS = {  # the field with the values of a tensor without raw data
    torch.float32: "float_data", torch.float64: "double_data", torch.int64: "int64_data",
}  # fmt: skip
_DOMAINS = ("", "ai.onnx", "com.microsoft", "ai.onnx.ml")


@dataclass
class OnnxTensor(Weight):
    """One tensor of the file; 4-bit integers are loaded one per byte."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    proto: TensorProto = field(repr=False)
    path: Path | None = None  # file of the external data; start and end are bytes in it
    start: int = 0
    end: int = 0

    @property
    def halves(self) -> bool:
        """Whether the values are 4-bit integers."""
        return self.proto.data_type in _HALVES

    def load(self) -> Tensor:
        """The values in the shape of the tensor, 4-bit integers as one byte each. TensorError if floats hold NaN."""
        if self.halves:
            return self._halves()
        if self.path is not None or self.proto.raw_data:
            value = self._raw().view(self.dtype)
        elif self.dtype in _FIELDS:
            value = torch.tensor(list(getattr(self.proto, _FIELDS[self.dtype])), dtype=self.dtype)
        elif self.dtype in (torch.float16, torch.bfloat16):
            value = torch.tensor(list(self.proto.int32_data), dtype=torch.int32).to(torch.uint16).view(self.dtype)
        elif self.dtype == torch.float8_e4m3fn:
            value = torch.tensor(list(self.proto.int32_data), dtype=torch.int32).to(torch.uint8).view(self.dtype)
        else:
            value = torch.tensor(list(self.proto.int32_data), dtype=torch.int32).to(self.dtype)
        if value.is_floating_point() and bool(value.isnan().any()):
            raise TensorError(self.name, "holds NaN", "the file is damaged")
        return value.view(self.shape)

    def _raw(self) -> Tensor:
        if self.path is None:
            return torch.frombuffer(bytearray(self.proto.raw_data or b"\0"), dtype=torch.uint8)
        raw = mapped(self.path)[self.start : self.end]
        return raw.clone() if self.start % self.dtype.itemsize else raw

    def _halves(self) -> Tensor:
        if self.path is None and not self.proto.raw_data:
            packed = torch.tensor(list(self.proto.int32_data), dtype=torch.int32).to(torch.uint8)
        else:
            packed = self._raw()
        codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten()[: math.prod(self.shape)].view(self.shape)
        if not _HALVES[self.proto.data_type]:
            return codes
        return ((codes ^ 8).to(torch.int8) - 8).to(torch.int8)


@dataclass(frozen=True)
class OnnxContainer:
    """A model file: its graph, with functions inlined, and its initializers by name."""

    path: Path
    graph: GraphProto
    tensors: dict[str, OnnxTensor]


def open_container(path: Path) -> OnnxContainer:
    """Read and check a file. CheckpointError or TensorError if it is damaged, UnsupportedModel for ops or tensors that
    icc does not know."""
    model = _parsed(path)
    if not model.graph.node or not model.graph.output:
        raise CheckpointError(f"{path} is not an ONNX model, or an empty one", "export it again")
    _check_opset(path, model)
    foreign = {o.domain for o in model.opset_import} - set(_DOMAINS)
    if model.functions:
        model = _inlined(path, model)
        foreign = {node.domain for node in model.graph.node} - set(_DOMAINS)
    used = {node.domain for node in model.graph.node}
    if bad := sorted(foreign & used):
        raise UnsupportedModel(f"{path} has ops of the domain {bad[0]!r}, which icc does not know")
    if model.graph.sparse_initializer:
        raise UnsupportedModel(f"{path} has sparse tensors, which icc does not read", "export it with dense ones")
    _check_values(path, model.graph)
    return OnnxContainer(path, model.graph, {t.name: open_tensor(path, t) for t in model.graph.initializer})


def _check_opset(path: Path, model: ModelProto) -> None:
    """Raise UnsupportedModel unless ONNX's own ops are of an opset from _OLDEST to the newest that the onnx package
    knows, whose semantics are known."""
    version = next((int(o.version) for o in model.opset_import if o.domain in ("", "ai.onnx")), 0)
    newest = onnx_opset_version()
    if not _OLDEST <= version <= newest:
        said = f"opset {version}" if version else "no opset"
        raise UnsupportedModel(f"{path} is of {said}: icc reads {_OLDEST} to {newest}", "export it with another opset")


def _check_values(path: Path, graph: GraphProto) -> None:
    """Check that every value is computed once, and that the outputs are computed."""
    made = Counter(name for node in graph.node for name in node.output if name)
    twice = next((name for name, count in made.items() if count > 1), None)
    given = {i.name for i in graph.input} | {t.name for t in graph.initializer}
    absent = next((o.name for o in graph.output if o.name not in made and o.name not in given), None)
    if twice or absent:
        why = f"two nodes make the value {twice!r}" if twice else f"nothing makes its output {absent!r}"
        raise CheckpointError(f"{path} is damaged: {why}", "export it again")


def sorted_nodes(nodes: Sequence[NodeProto]) -> list[NodeProto]:
    """The nodes in topological order; some converters append nodes at the end."""
    makers = {name: i for i, node in enumerate(nodes) for name in node.output if name}
    order: dict[int, None] = {}
    for last in range(len(nodes)):
        pending, open_nodes = [last], set()
        while pending:
            current = pending[-1]
            open_nodes.add(current)
            before = (makers[name] for name in nodes[current].input if name in makers)
            waits = [i for i in before if i not in order and i not in open_nodes]
            if not waits:
                order[pending.pop()] = None
            pending += waits
    return [nodes[i] for i in order]


def _parsed(path: Path) -> ModelProto:
    from google.protobuf.message import DecodeError

    size = path.stat().st_size
    if size >= _LIMIT:
        raise CheckpointError(f"{path} has {size} bytes: an ONNX file has less than 2 GiB", "export with external data")
    try:
        return ModelProto.FromString(path.read_bytes())
    except DecodeError as error:
        raise CheckpointError(f"{path} is truncated or not an ONNX file", "download or export it again") from error


def _inlined(path: Path, model: ModelProto) -> ModelProto:
    from onnx import inliner

    try:
        return inliner.inline_local_functions(model)
    except Exception as error:  # an error of the C++ library, without its own class
        raise CheckpointError(f"{path}: its functions cannot be written out: {_line(error)}") from error


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def open_tensor(path: Path, proto: TensorProto) -> OnnxTensor:
    """The handle of a tensor. TensorError unless its number of bytes fits its shape, and they are in the file or in one
    beside it."""
    name, kind = proto.name, proto.data_type
    if kind not in DTYPES and kind not in _HALVES:
        known = TensorProto.DataType.Name(kind) if kind in TensorProto.DataType.values() else str(kind)
        raise TensorError(name, f"has the type {known}, which icc does not read")
    shape = tuple(int(size) for size in proto.dims)
    if any(size < 0 for size in shape):
        raise TensorError(name, f"has the shape {list(shape)}", "the file is damaged")
    count = math.prod(shape)
    dtype = DTYPES.get(kind, torch.int8 if _HALVES.get(kind) else torch.uint8)
    nbytes = -(-count // 2) if kind in _HALVES else count * dtype.itemsize
    if proto.data_location == TensorProto.EXTERNAL:
        return OnnxTensor(name, shape, dtype, proto, *_outside(path, proto, nbytes))
    held = len(proto.raw_data) if proto.raw_data else _typed(proto, dtype)
    if held != (nbytes if proto.raw_data or kind in _HALVES else count):
        raise TensorError(name, f"does not have the values of its shape {list(shape)}", "the file is damaged")
    return OnnxTensor(name, shape, dtype, proto)


def _typed(proto: TensorProto, dtype: torch.dtype) -> int:
    return len(getattr(proto, _FIELDS.get(dtype, "int32_data")))


def _outside(path: Path, proto: TensorProto, nbytes: int) -> tuple[Path, int, int]:
    """(file, start, end) of external data, which must lie in the folder of the model."""
    entries: dict[str, Any] = {entry.key: entry.value for entry in proto.external_data}
    location = entries.get("location", "")
    folders = path.absolute().parent, path.resolve().parent  # a snapshot of the hub links both into one folder
    found = [(folder / location).resolve() for folder in folders]
    file = next((file for file in found if file.is_file()), found[0])
    plain = location and not Path(location).is_absolute() and ".." not in Path(location).parts
    if not plain or not any(file.is_relative_to(folder.resolve()) for folder in folders):
        raise CheckpointError(f"{path} names data outside its folder: {location!r}")
    if not file.is_file():
        raise CheckpointError(f"{path} lacks its data file {location}", "download or export it again")
    try:
        start, length = int(entries.get("offset", 0)), int(entries.get("length", nbytes))
    except ValueError as error:
        raise TensorError(proto.name, f"has external data at {entries}", "the file is damaged") from error
    if length != nbytes or start < 0:
        raise TensorError(
            proto.name, f"has {length} bytes at {start} for the shape {list(proto.dims)}", "the file is damaged"
        )
    if start + length > file.stat().st_size:
        raise CheckpointError(
            f"{file} is truncated: tensor {proto.name!r} ends at byte {start + length}, the file at "
            f"{file.stat().st_size}",
            "download or export it again",
        )
    return file, start, start + length

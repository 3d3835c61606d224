"""Writes an exported graph to files: the model and, if they are large, its weights beside it, read one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from onnx import ModelProto, TensorProto, helper
from torch import Tensor

from ... import __version__
from ..engine.atomic import written
from .builder import TYPES, Initializer, StoredInitializers
from .export import IR_VERSION, Exported, opset_imports

INLINE_LIMIT = 256 << 20  # most bytes of weights inside the model file; protobuf cannot hold 2 GiB
_SMALL = 1 << 10  # most bytes of an initializer that always stays in the model file
_ALIGNMENT = 4096  # alignment in bytes of values in the data file, so that they can be mapped
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Written:
    """The files that were written, and their sizes in bytes."""

    files: dict[Path, int]
    nodes: int


def write_model(exported: Exported, path: Path, external: bool = False, progress: Progress | None = None) -> Written:
    """Write `path`, and `path`.data if `external` or if the weights exceed INLINE_LIMIT bytes.

    Both are written atomically by `engine.atomic.written`, which raises WriteError. progress: called with bytes done
    and bytes in all; None: not called.
    """
    total = sum(item.nbytes for stored in exported.stored for item in stored.initializers)
    external = external or total > INLINE_LIMIT
    data = path.with_name(f"{path.name}.data")
    model = ModelProto(
        ir_version=IR_VERSION,
        producer_name="icc",
        producer_version=__version__,
        opset_import=[helper.make_opsetid(*pair) for pair in opset_imports(exported)],
    )
    model.graph.CopyFrom(exported.graph)
    with ExitStack() as stack:
        out = stack.enter_context(stack.enter_context(written(path)).open("wb"))
        side = stack.enter_context(stack.enter_context(written(data)).open("wb")) if external else None
        done = 0
        for tensor, value in _initializers(exported.stored):
            _place(tensor, value, side, data.name)
            model.graph.initializer.append(tensor)
            done += value.numel() * value.element_size()
            if progress is not None:
                progress(done, total)
        out.write(model.SerializeToString(deterministic=True))
    files = {file: file.stat().st_size for file in ([path, data] if external else [path])}
    if not external:
        data.unlink(missing_ok=True)  # left from a file that was replaced
    return Written(files, len(exported.graph.node))


def _initializers(stored: tuple[StoredInitializers, ...]) -> Iterator[tuple[TensorProto, Tensor]]:
    for group in stored:
        for item, value in zip(group.initializers, group.load(), strict=True):
            yield _empty(item), value.to(item.dtype).contiguous().reshape(item.shape)


def _empty(item: Initializer) -> TensorProto:
    return TensorProto(name=item.name, data_type=TYPES[item.dtype], dims=item.shape)


def _place(tensor: TensorProto, value: Tensor, side: BinaryIO | None, location: str) -> None:
    """Store the values, of any shape, of an initializer: in the message, or, if `side` is not None, in that file,
    called `location`."""
    raw = value.reshape(-1).view(torch.uint8).numpy() if value.numel() else None
    if side is None or raw is None or raw.nbytes < _SMALL:
        tensor.raw_data = b"" if raw is None else raw.tobytes()
        return
    side.write(bytes(-side.tell() % _ALIGNMENT))
    tensor.data_location = TensorProto.EXTERNAL
    for key, entry in (("location", location), ("offset", str(side.tell())), ("length", str(raw.nbytes))):
        tensor.external_data.add(key=key, value=entry)
    side.write(raw.data)

"""An exported graph -> files: the model, and beside it its weights where they are large, read one at a time."""

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

INLINE_LIMIT = 256 << 20  # bytes of weights that a model file holds itself; protobuf cannot hold 2 GiB
_SMALL = 1 << 10  # bytes of an initializer that is never moved out
_ALIGNMENT = 4096  # of values in the data file, so that they can be mapped
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Written:
    """The files, and their bytes."""

    files: dict[Path, int]
    nodes: int


def write_model(exported: Exported, path: Path, external: bool = False, progress: Progress | None = None) -> Written:
    """Write `path`, and `path`.data where `external` or the weights are above INLINE_LIMIT bytes.

    Both are written as `engine.atomic.written` says, which raises WriteError. progress: called with bytes done and in
    all, unless it is None.
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
        data.unlink(missing_ok=True)  # of the file that was replaced
    return Written(files, len(exported.graph.node))


def _initializers(stored: tuple[StoredInitializers, ...]) -> Iterator[tuple[TensorProto, Tensor]]:
    for group in stored:
        for item, value in zip(group.initializers, group.load(), strict=True):
            yield _empty(item), value.to(item.dtype).contiguous().reshape(item.shape)


def _empty(item: Initializer) -> TensorProto:
    return TensorProto(name=item.name, data_type=TYPES[item.dtype], dims=item.shape)


def _place(tensor: TensorProto, value: Tensor, side: BinaryIO | None, location: str) -> None:
    """Give an initializer its values: in the message, or in the file `location` that `side` writes."""
    raw = value.reshape(-1).view(torch.uint8).numpy() if value.numel() else None
    if side is None or raw is None or raw.nbytes < _SMALL:
        tensor.raw_data = b"" if raw is None else raw.tobytes()
        return
    side.write(bytes(-side.tell() % _ALIGNMENT))
    tensor.data_location = TensorProto.EXTERNAL
    for key, entry in (("location", location), ("offset", str(side.tell())), ("length", str(raw.nbytes))):
        tensor.external_data.add(key=key, value=entry)
    side.write(raw.data)

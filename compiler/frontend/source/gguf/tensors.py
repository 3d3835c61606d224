"""The weights of a GGUF model by transformers' names: handles that read the file when they are asked.

Names, and what llama.cpp's conversion did to values, are undone by the tables of the `gguf` package and of transformers
(`modeling_gguf_pytorch_utils`). What only reorders or joins rows is done to blocks as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from ....errors import TensorError, UnsupportedModel
from ....weights.formats.base import Parts
from ....weights.formats.blocks import BlockFormat
from ....weights.formats.ggml import GGML_FORMATS, block_bytes, parts_of
from ....weights.handles import Derived, GivenRows, QuantizedWeight, Transposed, Weight
from ..checkpoint import CheckpointTensor, mapped
from .config import architecture_of
from .container import Container, Entry

DENSE = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
_UNUSED = ("rope_freqs.weight",)  # see source.py


@dataclass
class BlockTensor(QuantizedWeight):
    """One tensor of blocks, as the file has it."""

    entry: Entry
    format: BlockFormat
    shape: tuple[int, ...] = field(init=False)
    dtype: torch.dtype = field(init=False, default=torch.float32)
    given: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.shape = self.entry.shape

    def parts(self) -> Parts:
        raw = mapped(self.entry.path)[self.entry.start : self.entry.end]
        found = parts_of(self.format, raw.view(*self.shape[:-1], -1, block_bytes(self.format)))
        for name in ("scales", "mins"):
            if name in found and not bool(torch.isfinite(found[name]).all()):
                raise TensorError(self.entry.name, f"has {name} that are NaN or Inf", "the file is damaged")
        return found


def weights_of(container: Container, model: nn.Module, config: Any) -> dict[str, Weight]:
    """A handle for every parameter that the file has, by its name in `model` (on meta).

    TensorError names a tensor that the model has no place for; UnsupportedModel a type that icc does not read.
    """
    names, processor = _names(container, model, config)
    found: dict[str, Weight] = {}
    halves: dict[str, dict[str, Weight]] = {}
    for entry in container.tensors.values():
        if entry.name in _UNUSED:
            continue
        part, name = _place(names, entry.name)
        if name is None:
            raise TensorError(entry.name, "is in the file, and the model has no place for it", _of(config))
        weight = _arranged(handle(entry), entry.name, processor)
        if part:
            halves.setdefault(name, {})[part] = weight
        else:
            found[name] = weight
    for name, pair in halves.items():
        if set(pair) != {"gate", "up"}:
            raise TensorError(name, "is in the file only by half", _of(config))
        found[name] = _stacked([pair["gate"], pair["up"]])
    return found


def handle(entry: Entry) -> Weight:
    """One tensor as the file has it; UnsupportedModel for a type that icc does not read."""
    if entry.kind in DENSE:
        return CheckpointTensor(entry.name, entry.path, entry.start, entry.end, entry.shape, DENSE[entry.kind])
    form = GGML_FORMATS.get(entry.kind)
    if form is None:
        known = ", ".join([*DENSE, *GGML_FORMATS]).upper()
        raise UnsupportedModel(
            f"tensor {entry.name!r} of {entry.path.name} is stored as {entry.kind.upper()}", f"icc reads {known}"
        )
    return BlockTensor(entry, form)


def _of(config: Any) -> str:
    return f"icc takes the file for a {config.model_type} model"


def _names(container: Container, model: nn.Module, config: Any) -> tuple[dict[str, str], Any]:
    """The model's name of every tensor that it has a place for, and what undoes llama.cpp's arrangement."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

    arch = architecture_of(container)
    number = next((key for key, value in MODEL_ARCH_NAMES.items() if value == arch), None)
    if number is None:
        raise UnsupportedModel(f"the gguf package does not know the architecture {arch!r}", "a newer one may")
    table = get_tensor_name_map(number, config.get_text_config().num_hidden_layers)
    processor = TENSOR_PROCESSORS.get(arch, TensorProcessor)(config=config.to_dict())
    found: dict[str, str] = {}
    left: list[str] = []
    for name in model.state_dict():
        plain, suffix = _split(processor.preprocess_name(name))
        ours = table.get_name(plain)
        if ours is None:
            processor.perform_fallback_tensor_mapping(found, suffix, "", name)
            left.append(name)
        else:
            found[ours + suffix] = name
    for name in left:  # models that llama.cpp converts without their head know shorter names
        plain, suffix = _split(name)
        while "." in plain:
            plain = plain.split(".", 1)[1]
            if (ours := table.get_name(plain)) is not None:
                found.setdefault(ours + suffix, name)
                break
    return found, processor


def _split(name: str) -> tuple[str, str]:
    for suffix in (".weight", ".bias"):
        if name.endswith(suffix):
            return name.removesuffix(suffix), suffix
    return name, ""


def _place(names: Mapping[str, str], name: str) -> tuple[str, str | None]:
    """Which half of a parameter a tensor is, if it is one, and the parameter's name."""
    bare = name.removesuffix(".weight")
    for part in ("gate", "up"):
        if bare.endswith(f"ffn_{part}_exps") and bare in names:
            return part, names[bare]
    return "", names.get(name) or names.get(bare)


def _stacked(pieces: list[Weight]) -> Weight:
    """Gate and up of experts [E, I, H] as one weight [E, 2 I, H]."""
    blocks = tuple(piece for piece in pieces if isinstance(piece, QuantizedWeight))
    if len(blocks) == len(pieces) and blocks[0].format.merges_with(blocks[1].format):
        return GivenRows(blocks)
    experts, rows, k = pieces[0].shape
    total = rows + pieces[1].shape[-2]
    dtype = pieces[0].dtype if pieces[0].dtype == pieces[1].dtype else torch.float32
    return Derived(lambda *v: torch.cat([p.to(dtype) for p in v], 1), tuple(pieces), (experts, total, k), dtype)


def _arranged(weight: Weight, name: str, processor: Any) -> Weight:
    """The weight as transformers has it: what `process` of its tensor processor does, to a handle."""
    if type(processor).process is _plain_process() or name.endswith(("_exps.weight", "_exps.bias")):
        return weight

    def arrange(values: np.ndarray) -> np.ndarray:
        taken: dict[str, Any] = {"tensors": {}}
        result = processor.process(weights=values, name=name, tensor_key_mapping=None, parsed_parameters=taken).weights
        return next((v.numpy() for v in taken["tensors"].values()), result)

    if isinstance(weight, QuantizedWeight):
        return _arranged_blocks(weight, name, arrange)
    probe = np.broadcast_to(np.float32(-1), weight.shape)
    shown = arrange(probe)
    if shown is probe:
        return weight

    def load(values: Tensor) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(arrange(values.to(torch.float32).numpy())))

    return Derived(load, (weight,), shown.shape, torch.float32)


def _plain_process() -> Any:
    from transformers.modeling_gguf_pytorch_utils import TensorProcessor

    return TensorProcessor.process


def _arranged_blocks(weight: QuantizedWeight, name: str, arrange: Callable[[np.ndarray], np.ndarray]) -> Weight:
    """Blocks lie along rows, so a change of the rows' order leaves them as they are. Others are undone on values."""
    rows, k = weight.shape[-2:]
    numbers = np.arange(rows, dtype=np.int32)[:, None]
    if len(weight.shape) == 2:
        try:
            order = arrange(numbers)
        except ValueError:  # it asks for all columns
            order = arrange(np.ascontiguousarray(np.broadcast_to(numbers, (rows, k))))
        if order.shape[0] == rows and np.array_equal(np.sort(order[:, 0]), numbers[:, 0]):
            if np.array_equal(order[:, 0], numbers[:, 0]):
                return weight
            return GivenRows((weight,), torch.from_numpy(order[:, 0].astype(np.int64)))
        if order.shape == (1, rows):
            return Transposed(weight)
    raise UnsupportedModel(f"tensor {name!r} comes quantized, and its values are not those of the model's parameter")

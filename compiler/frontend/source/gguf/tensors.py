"""The weights of a GGUF model by transformers' names: handles that read the file when they are loaded.

llama.cpp's names and changes of values are undone by the tables of the `gguf` package and of transformers
(`modeling_gguf_pytorch_utils`). Quantized blocks are kept if rows are only reordered or joined.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from .....runtime.format.gguf import GgufContainer, GgufTensor
from ....errors import TensorError, UnsupportedModel
from ....weights.formats.base import Parts
from ....weights.formats.blocks import BlockFormat
from ....weights.formats.ggml import GGML_FORMATS, block_bytes, parts_of
from ....weights.handles import Constant, QuantizedWeight, Weight
from ..checkpoint import CheckpointTensor, mapped
from .arrangement import Arrangement, shaped
from .config import architecture, architecture_of
from .keys import NUMBERS, key, layer_count
from .names import LAYER, layer_of, place_of, places, stacked_halves
from .rope import rope_of

DENSE = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
_FACTORS = ("rope_factors_short.weight", "rope_factors_long.weight")


@dataclass
class BlockTensor(QuantizedWeight):
    """One tensor of quantized blocks in the file."""

    entry: GgufTensor
    format: BlockFormat
    shape: tuple[int, ...] = field(init=False)
    dtype: torch.dtype = field(init=False, default=torch.float32)
    given: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.shape = self.entry.shape

    def parts(self) -> Parts:
        """The codes, scales and other parts of the blocks. TensorError if a scale is NaN or infinite."""
        raw = mapped(self.entry.path)[self.entry.start : self.entry.end]
        found = parts_of(self.format, raw.view(*self.shape[:-1], -1, block_bytes(self.format)))
        for name in ("scales", "mins"):
            if name in found and not bool(torch.isfinite(found[name]).all()):
                raise TensorError(self.entry.name, f"has {name} that are NaN or Inf", "the file is damaged")
        return found


def weights_of(container: GgufContainer, model: nn.Module, config: Any) -> dict[str, Weight]:
    """A handle for every parameter in the file, by its name in `model` (on meta).

    TensorError names a tensor without a parameter in the model, UnsupportedModel a type that icc does not read.
    """
    arch, own = architecture_of(container), architecture(container)
    tensors, expected = container.tensors, model.state_dict()
    arrangement = Arrangement(arch, own, tensors, config)
    names = places(arch, own, tensors, expected, config, arrangement.processor)
    guessing = range(layer_count(container), key(container, "block_count"))
    elsewhere = ("rope_freqs.weight", *(_FACTORS if rope_of(config.to_dict()).get("rope_type") == "longrope" else ()))
    found: dict[str, Weight] = {}
    halves: dict[str, dict[str, Weight]] = {}
    for entry in container.tensors.values():
        if entry.name in elsewhere or layer_of(entry.name) in guessing:
            continue
        part, name = place_of(names, entry.name)
        if name is None:
            raise TensorError(entry.name, "is in the file, and the model has no place for it", _of(config))
        weight = arrangement.undone(handle(entry), entry.name)
        if part:
            halves.setdefault(name, {})[part] = weight
        else:
            weight = arrangement.down(weight) if "ffn_down_exps" in entry.name else weight
            found[name] = shaped(weight, expected[name].shape) if name in expected else weight
    found |= arrangement.latent(found) | _numbers(container, expected)
    for name, pair in halves.items():
        if set(pair) == {"up"} and pair["up"].shape == tuple(expected[name].shape):
            found[name] = pair["up"]
            continue
        if set(pair) != {"gate", "up"}:
            raise TensorError(name, "is in the file with only one of its halves", _of(config))
        join = arrangement.stacked if stacked_halves(name) else lambda *both: arrangement.experts([*both])
        found[name] = join(pair["gate"], pair["up"])
    return found


def _numbers(container: GgufContainer, expected: Mapping[str, Tensor]) -> dict[str, Weight]:
    """Parameters whose values are in the metadata, one number per layer."""
    found: dict[str, Weight] = {}
    for name, parameter in expected.items():
        values = next((container.metadata.get(ours) for end, ours in NUMBERS.items() if name.endswith(f".{end}")), None)
        layer = LAYER.match(name)
        if isinstance(values, np.ndarray) and layer and int(layer[1]) < len(values) and parameter.numel() == 1:
            found[name] = Constant(torch.tensor(values[int(layer[1])]).reshape(parameter.shape).to(torch.float32))
    return found


def handle(entry: GgufTensor) -> Weight:
    """The handle of one tensor in the file's arrangement. UnsupportedModel for a type that icc does not read."""
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

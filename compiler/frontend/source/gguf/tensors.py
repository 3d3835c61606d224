"""The weights of a GGUF model by transformers' names: handles that read the file when they are asked.

Names, and what llama.cpp's conversion did to values, are undone by the tables of the `gguf` package and of transformers
(`modeling_gguf_pytorch_utils`). What only reorders or joins rows is done to blocks as they are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn

from ....errors import TensorError, UnsupportedModel
from ....weights.formats.base import Parts
from ....weights.formats.blocks import BlockFormat
from ....weights.formats.ggml import GGML_FORMATS, block_bytes, parts_of
from ....weights.handles import QuantizedWeight, Weight
from ..checkpoint import CheckpointTensor, mapped
from .arrangement import Arrangement, shaped
from .config import architecture, architecture_of
from .container import Container, Entry

DENSE = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
_UNUSED = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")  # see source.py, config.py
_LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)\.")
_HALF = re.compile(r"blk\.\d+\.ffn_(gate|up)_exps\.(?:weight|bias)")
# experts of a layer as transformers has them: gate and up in one, and down
_EXPERTS = re.compile(
    r"(?:.*\.)?layers\.(\d+)\..*(?:experts\.(gate_up|down)_proj(_bias)?|block_sparse_moe\.(input|output)_linear\.weight)"
)


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
    arrangement = Arrangement(container, config)
    names, expected = _names(container, model, config, arrangement.processor), model.state_dict()
    found: dict[str, Weight] = {}
    halves: dict[str, dict[str, Weight]] = {}
    for entry in container.tensors.values():
        if entry.name in _UNUSED:
            continue
        part, name = _place(names, entry.name)
        if name is None:
            raise TensorError(entry.name, "is in the file, and the model has no place for it", _of(config))
        weight = arrangement.undone(handle(entry), entry.name)
        if part:
            halves.setdefault(name, {})[part] = weight
        else:
            weight = arrangement.down(weight) if "ffn_down_exps" in entry.name else weight
            found[name] = shaped(weight, expected[name].shape) if name in expected else weight
    found |= arrangement.latent(found)
    for name, pair in halves.items():
        if set(pair) != {"gate", "up"}:
            raise TensorError(name, "is in the file only by half", _of(config))
        found[name] = arrangement.experts([pair["gate"], pair["up"]])
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


def _names(container: Container, model: nn.Module, config: Any, processor: Any) -> dict[str, str]:
    """The model's name of every tensor that it has a place for."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    arch, aliases = architecture_of(container), architecture(container).names
    number = next((key for key, value in MODEL_ARCH_NAMES.items() if value == arch), None)
    if number is None:
        raise UnsupportedModel(f"the gguf package does not know the architecture {arch!r}", "a newer one may")
    table = get_tensor_name_map(number, config.get_text_config().num_hidden_layers)
    found: dict[str, str] = {}
    left: list[str] = []
    for name in model.state_dict():
        if name.endswith("self_attn.kv_b_proj.weight") and (layer := _LAYER.match(name)):
            for half in ("k", "v"):  # llama.cpp has them apart; `latent` joins them
                found[f"blk.{layer[1]}.attn_{half}_b.weight"] = f"{name}.{half}"
            continue
        if experts := _EXPERTS.fullmatch(name):
            layer, part, bias, linear = experts.groups()
            for half in ("down",) if part == "down" or linear == "output" else ("gate", "up", "gate_up"):
                found[f"blk.{layer}.ffn_{half}_exps.{'bias' if bias else 'weight'}"] = name
            continue
        own = next((ours for end, ours in aliases.items() if name.endswith(f".{end}")), None)
        if own is not None and (layer := _LAYER.match(name)):
            found[f"blk.{layer[1]}.{own}"] = name
            continue
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
    return found


def _split(name: str) -> tuple[str, str]:
    for suffix in (".weight", ".bias"):
        if name.endswith(suffix):
            return name.removesuffix(suffix), suffix
    return name, ""


def _place(names: Mapping[str, str], name: str) -> tuple[str, str | None]:
    """Which half of a parameter a tensor is, if it is one, and the parameter's name."""
    half = _HALF.fullmatch(name)
    return half[1] if half else "", names.get(name) or names.get(name.removesuffix(".weight"))

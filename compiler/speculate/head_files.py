"""The files of Medusa heads: the published layout, in safetensors.

Head i is `num_layers` residual blocks, x + silu(linear(x)), and an LM head:
    medusa_head.{i}.{layer}.linear.weight [hidden, hidden], medusa_head.{i}.{layer}.linear.bias [hidden]
    medusa_head.{i}.{num_layers}.weight [vocab, hidden]
Heads without an LM head share the model's, which may follow a projection of the head's own: a block only ever adds to
a hidden state (silu has no large negative values), which is little freedom before a fixed LM head.
    medusa_head.{i}.projection.weight [hidden, hidden]
The prefix `medusa_head.` may be missing, as it is in the checkpoints of FasterDecoding/Medusa. config.json has
medusa_num_heads and medusa_num_layers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ..errors import CheckpointError, TensorError
from ..frontend.source.checkpoint import open_checkpoint
from ..weights.handles import Weight
from .train_options import MAX_HEADS, MAX_LAYERS

PREFIX = "medusa_head."
FILE = "medusa_lm_head.safetensors"


@dataclass(frozen=True)
class MedusaHead:
    """One head: weight [hidden, hidden] and bias [hidden] of each block; its own LM head, or None; its projection, or
    None."""

    blocks: tuple[tuple[Weight, Weight], ...]
    lm_head: Weight | None
    projection: Weight | None = None


def read_heads(directory: Path) -> tuple[MedusaHead, ...]:
    """The heads of a directory, as lazy weights. CheckpointError or TensorError names what is missing or has a wrong
    shape."""
    num_heads, num_layers = _read_config(directory / "config.json")
    tensors = {name.removeprefix(PREFIX): tensor for name, tensor in open_checkpoint(directory).items()}

    def tensor(name: str, *shape: int) -> Weight:
        found = tensors.get(name)
        if found is None:
            raise TensorError(PREFIX + name, f"is missing in {directory}", "config.json asks for it")
        if shape and found.shape != shape:
            raise TensorError(PREFIX + name, f"has shape {list(found.shape)}, not {list(shape)}")
        return found

    hidden = tensor("0.0.linear.weight").shape[-1] if num_layers else tensor("0.0.weight").shape[-1]
    heads: list[MedusaHead] = []
    for i in range(num_heads):
        blocks = tuple(
            (tensor(f"{i}.{layer}.linear.weight", hidden, hidden), tensor(f"{i}.{layer}.linear.bias", hidden))
            for layer in range(num_layers)
        )
        projection = tensor(f"{i}.projection.weight", hidden, hidden) if f"{i}.projection.weight" in tensors else None
        heads.append(MedusaHead(blocks, tensors.get(f"{i}.{num_layers}.weight"), projection))
    if len({head.lm_head is None for head in heads}) > 1:
        raise CheckpointError(f"{directory}: some heads have an LM head of their own and some have none")
    if not num_layers and heads[0].lm_head is None:
        raise CheckpointError(f"{directory}: heads without layers and without LM heads would all say the same")
    return tuple(heads)


def _read_config(path: Path) -> tuple[int, int]:
    if not path.is_file():
        raise CheckpointError(f"{path.parent} has no config.json", "give the directory that `icc train-heads` wrote")
    try:
        config: Any = json.loads(path.read_text(encoding="utf-8"))
        counts = config["medusa_num_heads"], config["medusa_num_layers"]
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise CheckpointError(f"{path} does not say medusa_num_heads and medusa_num_layers") from error
    for count, least, most in zip(counts, (1, 0), (MAX_HEADS, MAX_LAYERS), strict=True):
        if not isinstance(count, int) or not least <= count <= most:
            raise CheckpointError(f"{path}: {counts[0]!r} heads of {counts[1]!r} layers are not possible")
    return counts


def write_heads(directory: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    """Write the tensors [..] (named without prefix) in bf16, and config.json; each file is written atomically."""
    directory.mkdir(parents=True, exist_ok=True)
    stored = {PREFIX + name: value.detach().to("cpu", torch.bfloat16).contiguous() for name, value in tensors.items()}
    partial = directory / (FILE + ".partial")
    save_file(stored, partial, metadata={"format": "pt"})
    partial.replace(directory / FILE)
    partial = directory / "config.json.partial"
    partial.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    partial.replace(directory / "config.json")

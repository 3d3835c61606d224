"""Writes the layers that the runtime computes after pooling, with their weights as files of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from ...runtime.format.manifest import TailLayer
from ..errors import CheckpointError
from ..frontend.ending import layer_weights
from ..frontend.source.pooling import LayerBehind
from ..weights.handles import Weight

_FOLDER = "pooling"


def write_tail(stage: Path, layers: Sequence[LayerBehind], width: int) -> tuple[list[TailLayer], int]:
    """The layers after pooling, whose input is a vector of `width` numbers, and the width of their result. Weights are
    written as float32. CheckpointError if a layer takes vectors of another width."""
    found = []
    for number, layer in enumerate(layers):
        if layer.kind == "normalize":
            found.append(TailLayer("normalize"))
            continue
        weight, bias = layer_weights(layer)
        if weight.shape[-1] != width:
            raise CheckpointError(f"{layer.path} takes vectors of {weight.shape[-1]} numbers, not of {width}")
        name = f"{_FOLDER}/{number}"
        files = {"weight": _write(stage, f"{name}.weight.npy", weight)}
        if bias is not None:
            files["bias"] = _write(stage, f"{name}.bias.npy", bias)
        if layer.adds_input and weight.shape[0] != width:
            files["residual"] = _write(stage, f"{name}.residual.npy", layer_weights(layer, "residual")[0])
        found.append(TailLayer(layer.kind, activation=layer.activation, adds_input=layer.adds_input, **files))
        width = weight.shape[0]
    return found, width


def _write(stage: Path, name: str, weight: Weight) -> str:
    (stage / _FOLDER).mkdir(exist_ok=True)
    np.save(stage / name, weight.load().to(torch.float32).contiguous().numpy(), allow_pickle=False)
    return name

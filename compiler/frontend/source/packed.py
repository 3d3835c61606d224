"""Reads checkpoints whose linear layers are packed integers with a scale and a zero per group.

GPTQ, AWQ (gemm and gemv) and compressed-tensors (pack-quantized, int-quantized). Each layer's tensors become one handle
by the name of its weight, with the values (code - zero) scale. Other methods (8-bit and 4-bit floats, bitsandbytes,
MLX, HQQ, BitNet) have their own files. Layers of one compressed-tensors checkpoint may be of any of its kinds, which
the names and dtypes of a layer's tensors show.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch

from ...errors import TensorError
from ...weights.handles import QuantizedWeight, SortedColumns, Weight
from .bitnet import with_signs
from .bitsandbytes import with_states
from .e2m1 import with_floats
from .float8 import with_scales
from .hqq import with_zeros
from .mlx import with_biases
from .packed_layers import AwqLayer, GemvLayer, GptqLayer, Int8Layer, PackedLayer, WordsLayer
from .packings import (
    AwqPacking,
    BitnetPacking,
    BitsandbytesPacking,
    CompressedPacking,
    E2m1Packing,
    Float8Packing,
    GemvPacking,
    GptqPacking,
    HqqPacking,
    MlxPacking,
    Packing,
)

_NAMES = (
    "qweight", "qzeros", "scales", "g_idx", "weight_packed", "weight_scale", "weight_zero_point", "weight_shape",
    "weight_g_idx", "weight", "input_scale", "output_scale", "input_zero_point",
)  # fmt: skip
_LAYERS: dict[type[Packing], type[PackedLayer]] = {
    GptqPacking: GptqLayer, AwqPacking: AwqLayer, GemvPacking: GemvLayer,
}  # fmt: skip


def unpacked(tensors: Mapping[str, Weight], packing: Packing) -> dict[str, Weight]:
    """The checkpoint with one handle in place of each layer's packed tensors. TensorError if tensors are missing, or if
    a matrix has no elements."""
    found = _unpacked(tensors, packing)
    for name, weight in found.items():
        if isinstance(weight, QuantizedWeight) and not prod(weight.shape):
            raise TensorError(name, f"has no elements: its shape is {list(weight.shape)}", "the checkpoint is damaged")
    return found


def _unpacked(tensors: Mapping[str, Weight], packing: Packing) -> dict[str, Weight]:
    match packing:
        case Float8Packing(block=block, alone=alone):
            return with_scales(tensors, block, alone)
        case E2m1Packing(block=block, alone=alone):
            return with_scales(with_floats(tensors), block, alone)  # some models have layers of 8 bits, too
        case CompressedPacking(block=block, alone=alone):
            return with_scales(with_floats(_with_integers(tensors, packing)), block, alone)
        case BitsandbytesPacking():
            return with_states(tensors)
        case HqqPacking():
            return with_zeros(tensors)
        case BitnetPacking(divides=divides):
            return with_signs(tensors, divides)
        case MlxPacking():
            return with_biases(tensors, packing)
        case _:
            return _with_integers(tensors, packing)


def _with_integers(tensors: Mapping[str, Weight], packing: Packing) -> dict[str, Weight]:
    taken: set[str] = set()
    found: dict[str, Weight] = {}
    for name in tensors:
        layer, kind = name.rpartition(".")[0], _kind(name, tensors, packing)
        if kind is None:
            continue
        own = {n: tensors[f"{layer}.{n}"] for n in _NAMES if f"{layer}.{n}" in tensors}
        taken |= {f"{layer}.{n}" for n in own}
        weight = kind(layer, own, packing)
        found[f"{layer}.weight"] = weight if weight.order is None else SortedColumns(weight, weight.order)
    return {**{name: weight for name, weight in tensors.items() if name not in taken}, **found}


def _kind(name: str, tensors: Mapping[str, Weight], packing: Packing) -> type[PackedLayer] | None:
    """How a layer is packed, given the tensor with its codes; None if the tensor holds no codes, or codes of floats."""
    layer, _, last = name.rpartition(".")
    if not isinstance(packing, CompressedPacking):
        return _LAYERS[type(packing)] if last == "qweight" else None
    if last == "weight_packed":
        return WordsLayer if tensors[name].dtype != torch.uint8 else None
    integers = last == "weight" and tensors[name].dtype == torch.int8 and f"{layer}.weight_scale" in tensors
    return Int8Layer if integers else None

"""Checkpoints that mlx_lm quantized: `weight`, `scales` and, for integer codes, `biases` of each layer.

(github.com/ml-explore/mlx, `mx.quantize`.) A value is scale code + bias, with one scale and one bias per group. In
modes "mxfp4" and "mxfp8" it is a 4-bit or 8-bit float times a power of two per 32 values, in "nvfp4" a 4-bit float
times an e4m3 per 16 values. Codes fill 32-bit words from the lowest bit, and may cross words. Layers may differ in bits
and groups, which config.json says. The experts of a layer are stacked in one tensor.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import ClassVar

import torch

from ...errors import TensorError, UnsupportedModel
from ...weights.formats.base import Parts
from ...weights.formats.blocks import OFFSET_SCALES, BlockFormat, with_offsets
from ...weights.formats.tables import MXFP4_FORMAT
from ...weights.handles import Constant, QuantizedWeight, Weight, derive
from .checkpoint import CheckpointTensor
from .e2m1 import E2m1Matrix, nvfp4_of
from .float8 import Float8Layer
from .packings import LayerBits, MlxPacking
from .words import columns, half_offsets

_AGAIN = "download the checkpoint again"
_STACK = re.compile(r"(.+)\.(?:switch_mlp|switch_glu|experts)\.((?:gate|up|down)_proj)")


def with_biases(tensors: Mapping[str, Weight], packing: MlxPacking) -> dict[str, Weight]:
    """The checkpoint with one handle in place of the tensors of each quantized layer, by the name of its weight. Each
    expert has its own handle, as in `experts.3.up_proj.weight`.

    TensorError for tensors that do not fit each other, UnsupportedModel for a layer that config.json does not describe.
    """
    found = dict(tensors)
    for name in tensors:
        layer, _, last = name.rpartition(".")
        if last == "scales" and f"{layer}.weight" in tensors:
            own = {part: found.pop(f"{layer}.{part}", None) for part in ("weight", "scales", "biases")}
            found[f"{layer}.weight"] = _matrix(layer, own, packing.of_layer(layer))
    return {name: weight for stack in found for name, weight in _experts(stack, found[stack]).items()}


def _experts(name: str, weight: Weight) -> dict[str, Weight]:
    """A tensor under its own name; or, for a stack of all experts, the tensor of each expert."""
    layer, _, last = name.rpartition(".")
    stack = _STACK.fullmatch(layer)
    if stack is None or len(weight.shape) != (3 if last == "weight" else 2):
        return {name: weight}
    return {f"{stack[1]}.experts.{i}.{stack[2]}.{last}": _at(weight, i) for i in range(weight.shape[0])}


def _at(weight: Weight, i: int) -> Weight:
    """The part of expert i in a tensor of all experts."""
    if not isinstance(weight, AffineMatrix | E2m1Matrix | Float8Layer):
        return derive(lambda t: t[i], weight)
    codes, scales = _at(weight.codes, i), _at(weight.scales, i)
    if isinstance(weight, AffineMatrix):
        return replace(weight, codes=codes, scales=scales, biases=_at(weight.biases, i))
    if isinstance(weight, E2m1Matrix):
        return replace(weight, codes=codes, scales=scales, shape=weight.shape[1:])
    return replace(weight, codes=codes, scales=scales)


def _matrix(layer: str, parts: Mapping[str, Weight | None], stored: LayerBits) -> QuantizedWeight:
    codes, scales, biases = (parts[part] for part in ("weight", "scales", "biases"))
    assert codes is not None and scales is not None
    *lead, words = codes.shape if codes.dtype == torch.uint32 and len(codes.shape) > 1 else (0, 0)
    k = 32 * words // stored.bits
    fits = (*lead, k // stored.group) == scales.shape and k % stored.group == 0 and prod(codes.shape) > 0
    if not fits or (stored.mode != "affine" and scales.dtype != torch.uint8):
        kind = str(codes.dtype).removeprefix("torch.")
        raise TensorError(
            f"{layer}.weight",
            f"is {kind} {list(codes.shape)} beside scales {list(scales.shape)}, which does not fit {stored.bits} bits "
            f"in groups of {stored.group} ({stored.mode})",
            _AGAIN,
        )
    if stored.mode == "mxfp8":
        return Float8Layer(f"{layer}.weight", _bytes(codes), scales, alone=True)
    if stored.mode == "mxfp4":
        return E2m1Matrix(layer, _bytes(codes), scales, None, MXFP4_FORMAT, (*lead, k))
    if stored.mode == "nvfp4":
        return E2m1Matrix(layer, _bytes(codes), scales, Constant(torch.ones(())), nvfp4_of(k), (*lead, k))
    if biases is None or biases.shape != scales.shape:
        raise TensorError(f"{layer}.biases", f"has not the shape {list(scales.shape)} of the scales", _AGAIN)
    return AffineMatrix(layer, codes, scales, biases, stored.bits)


def _bytes(words: Weight) -> Weight:
    """32-bit words [.., n] as bytes, uint8 [.., 4 n], the lowest first."""
    *lead, count = words.shape
    if isinstance(words, CheckpointTensor):
        return replace(words, shape=(*lead, 4 * count), dtype=torch.uint8)
    return derive(lambda t: t.view(torch.uint8), words)


@dataclass
class AffineMatrix(QuantizedWeight):
    """A matrix [N, K], or matrices of experts [E, N, K], of codes with a scale and a bias per group.

    codes: uint32 [.., N, K * bits / 32]. scales, biases: float16 or bfloat16 [.., N, K / group].
    """

    layer: str
    codes: Weight
    scales: Weight
    biases: Weight
    bits: int
    format: BlockFormat = field(init=False)
    shape: tuple[int, ...] = field(init=False)
    dtype: torch.dtype = field(init=False, default=torch.float32)
    given: ClassVar[bool] = True

    def __post_init__(self) -> None:
        *lead, words = self.codes.shape
        self.shape = (*lead, 32 * words // self.bits)
        kind = OFFSET_SCALES.get(self.scales.dtype)
        if kind is None or self.biases.dtype != self.scales.dtype:
            raise UnsupportedModel(
                f"{self.layer!r} has scales of {str(self.scales.dtype).removeprefix('torch.')}",
                "icc reads MLX checkpoints of float16 and bfloat16; convert the model with --dtype bfloat16",
            )
        self.format = with_offsets(self.bits, self.shape[-1] // self.scales.shape[-1], kind)

    def parts(self) -> Parts:
        """The codes, scales and offsets that are subtracted; see QuantizedWeight."""
        codes = columns(self.codes.load().view(torch.int32), self.bits)
        scales, biases = (part.load().to(torch.float32) for part in (self.scales, self.biases))
        mins = half_offsets(biases.neg(), f"{self.layer}.biases")
        return {"codes": codes.contiguous(), "scales": scales, "mins": mins}

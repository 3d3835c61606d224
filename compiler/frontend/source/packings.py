"""The kinds of packed checkpoints: one class per kind, with the facts from the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class LayerBits:
    """How an MLX layer is stored: bits of a code, values per group along K, and the mode (affine or a float format)."""

    bits: int
    group: int
    mode: str = "affine"


@dataclass(frozen=True)
class Packing:
    """How the weights of a checkpoint are packed: one class per kind, with the facts from the configuration.

    bits: bits of a code.
    """

    bits: int


@dataclass(frozen=True)
class GptqPacking(Packing):
    """GPTQ's columns of words. one_less: zeros are stored minus one (v1)."""

    one_less: bool = False


@dataclass(frozen=True)
class AwqPacking(Packing):
    """AWQ's rows of words, in the order of its gemm kernel."""


@dataclass(frozen=True)
class GemvPacking(Packing):
    """AWQ's rows of words in order, padded. group: values per group, which the tensors do not show."""

    group: int


@dataclass(frozen=True)
class ScaledPacking(Packing):
    """A checkpoint that may hold 8-bit floats. block: rows and columns that share a scale; None if the configuration
    does not say. alone: whether only weights, and no activations, are 8-bit floats."""

    block: tuple[int, int] | None = None
    alone: bool = False


@dataclass(frozen=True)
class Float8Packing(ScaledPacking):
    """8-bit floats."""


@dataclass(frozen=True)
class E2m1Packing(ScaledPacking):
    """4-bit floats (MXFP4, NVFP4), and some layers of 8-bit floats."""


@dataclass(frozen=True)
class CompressedPacking(ScaledPacking):
    """compressed-tensors': layers of integers, 4-bit floats and 8-bit floats."""


@dataclass(frozen=True)
class BitsandbytesPacking(Packing):
    """bitsandbytes' 4-bit tables, or 8-bit rows."""


@dataclass(frozen=True)
class MlxPacking(Packing):
    """MLX's words. layers: how layers named in the configuration are stored, and, under "", all others."""

    layers: Mapping[str, LayerBits]

    def of_layer(self, name: str) -> LayerBits:
        """How the layer of that name is stored."""
        return self.layers.get(name) or self.layers[""]


@dataclass(frozen=True)
class BitnetPacking(Packing):
    """BitNet's signs. divides: whether weights are divided by their scales."""

    divides: bool


@dataclass(frozen=True)
class HqqPacking(Packing):
    """HQQ's codes; each layer states its own bits."""

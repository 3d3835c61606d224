"""Checkpoints of BitNet b1.58: weights of -1, 0 and 1 with one scale per matrix (Ma et al. 2024, arXiv:2402.17764).

transformers stores four rows of the matrix in row r of the file: row N / 4 * i + r in bits 2 i and 2 i + 1. Activations
are quantized as for any 8-bit product here, while the model's own code uses one scale per row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import ClassVar

import torch

from ...errors import TensorError
from ...quantization import GROUPS
from ...weights.formats.base import Parts
from ...weights.formats.blocks import BlockFormat, ternary
from ...weights.handles import QuantizedWeight, Weight

_AGAIN = "download the checkpoint again"


def with_signs(tensors: Mapping[str, Weight], divides: bool) -> dict[str, Weight]:
    """The checkpoint with one handle in place of each packed matrix and its scale. divides: codes are divided by the
    scale, else multiplied. TensorError for tensors that do not fit each other."""
    found = dict(tensors)
    for name, codes in tensors.items():
        scale = tensors.get(f"{name}_scale")
        if name.endswith(".weight") and scale is not None:
            found[name] = TernaryMatrix(name, codes, scale, divides)
            del found[f"{name}_scale"]
    return found


@dataclass
class TernaryMatrix(QuantizedWeight):
    """A matrix [N, K] of -1, 0 and 1 times one number. codes: uint8 [N / 4, K]. scale: one float."""

    name: str
    codes: Weight
    scale: Weight
    divides: bool
    format: BlockFormat = field(init=False)
    shape: tuple[int, ...] = field(init=False)
    dtype: torch.dtype = field(init=False, default=torch.float32)
    given: ClassVar[bool] = True

    def __post_init__(self) -> None:
        shape, kind = self.codes.shape, str(self.codes.dtype).removeprefix("torch.")
        k = shape[-1] if shape else 0
        # with larger groups, the inner steps of GPU kernels grow, and registers spill
        group = next((size for size in GROUPS if k and k % size == 0), 0)
        if len(shape) != 2 or not group or self.codes.dtype != torch.uint8 or prod(self.scale.shape) != 1:
            raise TensorError(
                self.name,
                f"is {kind} {list(shape)} with scales {list(self.scale.shape)}, not bytes of four weights in rows "
                f"of a multiple of {GROUPS[-1]}, and one scale",
                _AGAIN,
            )
        self.shape = 4 * shape[0], k
        self.format = ternary(group)

    def parts(self) -> Parts:
        """The codes, each one more than its value, and the scale for each group; see QuantizedWeight."""
        packed, (n, k) = self.codes.load(), self.shape
        codes = torch.cat([packed >> 2 * i & 3 for i in range(4)])
        if bool((codes == 3).any()):
            raise TensorError(self.name, "holds codes that are none of -1, 0 and 1", _AGAIN)
        scale = self.scale.load().to(torch.float32).reshape(1, 1)
        scale = scale.reciprocal() if self.divides else scale
        if not bool(torch.isfinite(scale).all()):
            raise TensorError(f"{self.name}_scale", "is no valid scale", _AGAIN)
        return {"codes": codes, "scales": scale.expand(n, k // self.format.group).contiguous()}

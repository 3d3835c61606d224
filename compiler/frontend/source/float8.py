"""Checkpoints with matrices of 8-bit floats (E4M3) and separate scales, in all layouts that quantizers write.

Hugging Face's `fp8` (DeepSeek-V3, Qwen3-FP8), vLLM's and FBGEMM's, compressed-tensors (float-quantized) and ModelOpt
differ in the names of the scales and in their number: one, one per output channel, or one per block. Static scales of
activations are ignored: products that quantize their rows compute a scale for each row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil, prod
from typing import ClassVar

import torch
from torch import Tensor

from ...errors import TensorError, UnsupportedModel
from ...weights.formats.base import Parts
from ...weights.formats.float8 import NAN, Float8
from ...weights.handles import QuantizedWeight, Weight

E4M3 = torch.float8_e4m3fn
_FLOATS = (E4M3, torch.float8_e5m2)
_SCALES = ("weight_scale_inv", "weight_scale", "scale", "qscale_weight")  # names of the scales of `layer.weight`
_SUFFIXES = ("_scale_inv", "_scale")  # suffixes of the scales of other parameters
_AGAIN = "download the checkpoint again"


def with_scales(tensors: Mapping[str, Weight], block: tuple[int, int] | None, alone: bool = False) -> dict[str, Weight]:
    """The checkpoint with one handle in place of each matrix of 8-bit floats and its scales.

    block: rows and columns of a block; None if the configuration does not say. alone: see `Float8`. TensorError if
    scales are missing or do not fit their matrix.
    """
    taken: set[str] = set()
    found: dict[str, Weight] = {}
    for name, weight in tensors.items():
        if weight.dtype == E4M3 and len(weight.shape) > 1:
            scales = _scales_of(name, tensors)
            found[name] = Float8Layer(name, weight, tensors[scales], block, alone)
            taken |= {name, scales}
    return {**{name: weight for name, weight in tensors.items() if name not in taken}, **found}


def refuse_bare(tensors: Mapping[str, Weight]) -> None:
    """Raise UnsupportedModel for a tensor of 8-bit floats without scales."""
    for name, weight in tensors.items():
        if weight.dtype in _FLOATS:
            raise UnsupportedModel(
                f"tensor {name!r} is stored as {str(weight.dtype).removeprefix('torch.')}",
                "icc reads float8_e4m3fn with the scales that its quantization_config tells of",
            )


def _scales_of(name: str, tensors: Mapping[str, Weight]) -> str:
    """The name of the scales of a matrix. TensorError if there are none."""
    layer, _, last = name.rpartition(".")
    names = [f"{layer}.{scale}" for scale in _SCALES] if last == "weight" else []
    names += [name + suffix for suffix in _SUFFIXES]
    found = next((candidate for candidate in names if candidate in tensors), None)
    if found is None:
        raise TensorError(names[0], f"is missing from the checkpoint, and {name!r} has no scales", _AGAIN)
    return found


@dataclass
class Float8Layer(QuantizedWeight):
    """A matrix [N, K], or matrices of experts [E, N, K], with one scale, or [.., rows of blocks, columns of blocks]."""

    name: str
    codes: Weight
    scales: Weight
    block: tuple[int, int] | None = None
    alone: bool = False
    format: Float8 = field(init=False)
    rows: int = field(init=False)  # rows that share a scale
    shape: tuple[int, ...] = field(init=False)
    dtype: torch.dtype = field(init=False, default=torch.float32)
    given: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.shape = self.codes.shape
        height, width = self._grid()
        self.rows, group = self._blocks(height, width)
        self.format = Float8(group if width > 1 else 0, self.alone)

    def parts(self) -> Parts:
        """The codes and the scales; see QuantizedWeight. TensorError if either holds NaN, or if they do not fit each
        other."""
        codes = self.codes.load().view(torch.uint8)
        if bool(((codes & NAN) == NAN).any()):
            raise TensorError(self.name, "holds NaN", "the checkpoint is damaged")
        scales = _floats(self.scales.load())
        if not bool(torch.isfinite(scales).all()):
            raise TensorError(f"scales of {self.name}", "hold NaN or Inf", "the checkpoint is damaged")
        *lead, n, _ = self.shape
        height, width = self._grid()
        grid = scales.reshape(*([1] * len(lead) if scales.numel() == 1 else lead), height, width)
        spread = grid.repeat_interleave(self.rows, -2)[..., :n, :].expand(*lead, n, width)
        return {"codes": codes, "scales": spread.contiguous()}

    def _grid(self) -> tuple[int, int]:
        """Numbers of rows and columns of the scales of one matrix."""
        lead, given = self.shape[:-2], self.scales.shape
        if prod(given) == 1:
            return 1, 1
        if len(given) == len(lead) + 4 and given[-1] == given[-3] == 1:  # ModelOpt: [rows, 1, columns, 1]
            given = (*lead, given[-4], given[-2])
        own = given[len(lead) :]
        kind = self.scales.dtype
        known = kind.is_floating_point or kind == torch.uint8
        if given[: len(lead)] != lead or len(own) > 2 or not known:
            raise self._misfit()
        height, width = (*own, 1, 1)[:2]
        return height, width

    def _blocks(self, height: int, width: int) -> tuple[int, int]:
        """Numbers of rows and columns of a block."""
        *_, n, k = self.shape
        if self.block is not None:
            rows, columns = self.block
            if (ceil(n / rows), ceil(k / columns)) == (height, width):
                return rows, columns
        if not height or not width or n % height or k % width:
            raise self._misfit()
        return n // height, k // width

    def _misfit(self) -> TensorError:
        blocks = f" in blocks of {self.block[0]} x {self.block[1]}" if self.block else ""
        return TensorError(
            f"scales of {self.name}", f"have shape {list(self.scales.shape)} for {list(self.shape)}{blocks}", _AGAIN
        )


def _floats(scales: Tensor) -> Tensor:
    """Scales [..] as float32, exactly. A uint8 e means 2^(e - 127)."""
    if scales.dtype == torch.uint8:
        return torch.ldexp(torch.ones(scales.shape), scales.to(torch.int32) - 127)
    return scales.to(torch.float32)

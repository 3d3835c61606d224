"""Norms over groups of `d` elements of a row, with or without the residual addition before them."""

from __future__ import annotations

from typing import ClassVar

from ....runtime.format.operands import Operand
from .base import CODED, CodedRows, Step, step_type


class Norm(Step, frozen=True, kw_only=True):
    """The base of norms: a row is `groups` vectors of `d`. coding: the type in which `coded` also receives y, for
    products of 8 bits: "int8", "fp8" or "mxfp8"; "" for none."""

    OUTPUTS: ClassVar = ("y", "sum", "coded")
    EXTRA: ClassVar = ("coded",)
    DTYPES: ClassVar = {"coded": CODED}
    d: int
    groups: int = 1
    eps: float
    coding: str = ""

    def widths(self) -> dict[str, int]:
        return {**dict.fromkeys(("x", "r", "y", "sum"), self.d * self.groups), "w": self.d, "bias": self.d}


@step_type
class RmsNorm(Norm, frozen=True, kw_only=True, tag="rms_norm"):
    """y = rms_norm(x) w."""

    x: Operand
    w: Operand | None = None
    y: Operand
    coded: CodedRows | None = None


@step_type
class AddRmsNorm(Norm, frozen=True, kw_only=True, tag="add_rms_norm"):
    """sum = x + r; y = rms_norm(sum) w."""

    x: Operand
    r: Operand
    w: Operand | None = None
    y: Operand
    sum: Operand
    coded: CodedRows | None = None


@step_type
class LayerNorm(Norm, frozen=True, kw_only=True, tag="layer_norm"):
    """y = layer_norm(x) w + bias."""

    x: Operand
    w: Operand | None = None
    bias: Operand | None = None
    y: Operand
    coded: CodedRows | None = None


@step_type
class AddLayerNorm(Norm, frozen=True, kw_only=True, tag="add_layer_norm"):
    """sum = x + r; y = layer_norm(sum) w + bias."""

    x: Operand
    r: Operand
    w: Operand | None = None
    bias: Operand | None = None
    y: Operand
    sum: Operand
    coded: CodedRows | None = None

"""Products with a weight, and the int8 rows that those with quantized weights read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeVar

from ....program.steps.base import QuantizedRows
from ....program.steps.linear import (
    ExpertLinear,
    ExpertLinearQ,
    Linear,
    LinearQ,
    Product,
    QuantizeRows,
)
from ..layouts.affine import quant_tile_bytes
from ..layouts.elements import PLAIN
from ..layouts.split import high_tile_bytes, low_tile_bytes
from .base import KernelParams

P = TypeVar("P", bound=Product)

SCREENED_ROWS = 6  # with more rows a head takes its time for arithmetic, not for reading


def _bad_groups(k: int, group: int) -> str:
    return f"group {group} must be a multiple of 16 that divides k = {k}" if group % 16 or k % group else ""


@dataclass(frozen=True)
class DenseParams(KernelParams[P]):
    """Common to products with a weight in `tile_<format>`."""

    @classmethod
    def refusal(cls, step: P) -> str:
        if step.format not in ("f32", "bf16", "f16"):
            return f"unknown weight format {step.format!r}"
        return super().refusal(step)

    @property
    def item(self) -> int:
        return PLAIN[self.step.format]

    @property
    def table(self) -> str:
        return f"DENSE_{self.step.format.upper()}"

    @property
    def scratch_bytes(self) -> int:
        return self.isa.dense_blocks[-1].rows * self.step.k * 4 + 64


@dataclass(frozen=True)
class QuantParams(KernelParams[P]):
    """Common to products of int8 rows with a weight in q4, q8 or, where 8 bits are split, q8s."""

    @classmethod
    def refusal(cls, step: P) -> str:
        if not isinstance(step.x, QuantizedRows):
            return "products with codes need rows of int8"
        if step.bits not in (4, 8):
            return f"bits must be 4 or 8, not {step.bits}"
        return _bad_groups(step.k, step.group) or super().refusal(step)

    @property
    def groups(self) -> int:
        return self.step.k // self.step.group

    @property
    def tile_bytes(self) -> int:
        p = self.step
        return high_tile_bytes(p.k, p.group) if p.split else quant_tile_bytes(p.k, p.bits, p.group)

    @property
    def low_bytes(self) -> int:
        """Of a tile in the second plane; 0 where there is none."""
        return low_tile_bytes(self.step.k) if self.step.split else 0

    @property
    def table(self) -> str:
        return f"QUANT_Q{self.step.bits}{'S' if self.step.split else ''}"

    @property
    def scratch_bytes(self) -> int:
        return self.isa.quant_blocks[-1].rows * (self.step.k + 8 * self.groups) + 64


@dataclass(frozen=True)
class LinearParams(DenseParams[Linear]):
    """y = x W^T."""

    template: ClassVar[str] = "cpp/linear/linear.cpp.jinja"


@dataclass(frozen=True)
class LinearQParams(QuantParams[LinearQ]):
    """y = x W^T; a greedy batch may want only the largest of them, see screen.h."""

    template: ClassVar[str] = "cpp/linear/linear_q.cpp.jinja"

    @property
    def screen_table(self) -> str:
        return f"{self.table}_HIGH"

    @property
    def scratch_bytes(self) -> int:
        return max(super().scratch_bytes, self._screen_bytes() if self.step.screened else 0)

    def _screen_bytes(self) -> int:
        """Of a thread that screens: a panel, a norm per row and group, and a margin per row and tile."""
        rows, tiles = SCREENED_ROWS, self.step.n // 16 + 1
        return rows * (self.step.k + 8 * self.groups) + 4 * rows * (self.groups + tiles) + 3 * 64


@dataclass(frozen=True)
class ExpertLinearParams(DenseParams[ExpertLinear]):
    """Dense experts."""

    template: ClassVar[str] = "cpp/linear/expert_linear.cpp.jinja"


@dataclass(frozen=True)
class ExpertLinearQParams(QuantParams[ExpertLinearQ]):
    """Quantized experts."""

    template: ClassVar[str] = "cpp/linear/expert_linear_q.cpp.jinja"


@dataclass(frozen=True)
class QuantizeRowsParams(KernelParams[QuantizeRows]):
    """x -> codes, scales, sums."""

    template: ClassVar[str] = "cpp/linear/quantize_rows.cpp.jinja"

    @classmethod
    def refusal(cls, step: QuantizeRows) -> str:
        return _bad_groups(step.k, step.group) or super().refusal(step)

    @property
    def groups(self) -> int:
        return self.step.k // self.step.group

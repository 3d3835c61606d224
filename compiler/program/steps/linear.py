"""Products with a weight, and the rows of int8 that some of them read."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from ....runtime.format.operands import Operand
from ...ops.body import Body
from ..layout import Stored
from .base import CODED, FLOATS, VALUES, CodedRows, OperandGroup, QuantizedRows, Step, op_name, step_type
from .norm import AddLayerNorm, AddRmsNorm, LayerNorm, Norm, RmsNorm

NORMS: tuple[type[Norm], ...] = (RmsNorm, AddRmsNorm, LayerNorm, AddLayerNorm)


class Columns(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="columns"):
    """The columns of its product that an epilogue reads: for column c of the result, column `offset + stride * c`."""

    offset: int
    stride: int


class Extra(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="extra"):
    """The next of the product's extras. `stride`: elements between columns: 1, or 0 for one value per row."""

    stride: int


class AdapterChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag="change"):
    """The term that the adapter of a row adds (S-LoRA): up[slot] low + shift[slot], with `up` [slots, columns, rank]
    and `low` [rank]; 0 if the row has no adapter. ends: the product's next operands of these names are for the columns
    up to the first end, those after them for the columns up to the second, and so on. stored: the layout of `up` if it
    is packed bytes; None if it is rows of floats."""

    ends: tuple[int, ...]
    rank: int
    slots: int
    stored: Stored | None = None

    @property
    def spans(self) -> list[tuple[int, int]]:
        """The columns [begin, end) of each part."""
        return list(zip((0, *self.ends), self.ends, strict=False))


class Epilogue(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The function applied to a product: y [width] = body(inputs), column by column."""

    body: Body
    inputs: tuple[Columns | Extra | AdapterChange, ...]
    width: int


class Product(Step, frozen=True, kw_only=True):
    """y = finish(x W^T + bias). stored: the layout of W [.., n, k]. extras: other operands of the epilogue."""

    DTYPES: ClassVar = {
        "x": (*FLOATS, "i8"), "w": (*FLOATS, "u8"), "index": ("i32",), "extras": VALUES,
        "x_coded": CODED, "norm_out": (*FLOATS, *CODED), "slot": ("i32",), "up": (*FLOATS, "u8"),
    }  # fmt: skip
    x: Operand | QuantizedRows
    w: Operand
    bias: Operand | None = None
    extras: tuple[Operand, ...] = ()
    y: Operand
    k: int
    n: int
    stored: Stored
    epilogue: Epilogue | None = None

    @property
    def columns(self) -> int:
        """Columns of y, per matrix."""
        return self.n if self.epilogue is None else self.epilogue.width

    def _widths(self, x: int, y: int, matrices: int) -> dict[str, int]:
        """Widths of operands for rows of `x` elements and results of `y`."""
        found = {"x": x, "bias": matrices * self.n, "y": y}
        if isinstance(self.x, QuantizedRows):
            groups = x // self.stored.storage.row_group
            found |= {"x.codes": x, "x.scales": groups, "x.sums": groups}
        others = [part for part in (self.epilogue.inputs if self.epilogue else ()) if isinstance(part, Extra)]
        return found | {f"extras.{i}": (y - 1) * part.stride + 1 for i, part in enumerate(others)}


class NormInputs(OperandGroup, frozen=True, tag="norm_inputs"):
    """The operands that the norm after a product reads besides the product."""

    r: Operand | None = None
    w: Operand | None = None
    bias: Operand | None = None


class NormOutputs(OperandGroup, frozen=True, tag="norm_outputs"):
    """The operands that the norm after a product writes."""

    y: Operand
    sum: Operand | None = None
    codes: Operand | None = None
    scales: Operand | None = None


class RowProduct(Product, frozen=True, kw_only=True):
    """A product of every row with the same matrix. screened: the product gives the logits, of which greedy batches need
    only the largest, and its weight has a layout for that. norm: the op of the norm of whole rows that follows, with
    its eps, coding and operands; "" for none. x_coded: x in 8 bits, if the step that makes x also writes it; else None.
    slot: the slot of each row's adapter, with the operands of the epilogue's `AdapterChange` inputs; None without
    adapters."""

    OUTPUTS: ClassVar = ("y", "norm_out")
    EXTRA: ClassVar = ("x_coded", "slot")
    norm_in: NormInputs | None = None
    norm_out: NormOutputs | None = None
    screened: bool = False
    norm: str = ""
    eps: float = 0.0
    coding: str = ""
    x_coded: CodedRows | None = None
    low: tuple[Operand, ...] = ()
    up: tuple[Operand, ...] = ()
    shift: tuple[Operand, ...] = ()
    slot: Operand | None = None

    @property
    def changes(self) -> tuple[AdapterChange, ...]:
        """The terms that adapters add in the epilogue."""
        return tuple(
            part for part in (self.epilogue.inputs if self.epilogue else ()) if isinstance(part, AdapterChange)
        )

    @property
    def normed(self) -> Norm | None:
        """The norm as a separate step; None if the product has none."""
        ins, outs = self.norm_in, self.norm_out
        if ins is None or outs is None:
            return None
        operands = {"x": self.y, "r": ins.r, "w": ins.w, "bias": ins.bias, "y": outs.y, "sum": outs.sum}
        [kind] = (kind for kind in NORMS if op_name(kind) == self.norm)
        known: dict[str, Any] = {name: o for name, o in operands.items() if name in kind.__struct_fields__}
        if outs.codes is not None and outs.scales is not None:
            known |= {"coded": CodedRows(outs.codes, outs.scales), "coding": self.coding}
        return kind(kernel=self.kernel, rows=self.rows, d=self.columns, eps=self.eps, **known)

    def widths(self) -> dict[str, int]:
        normed = self.normed.widths() if self.normed else {}
        inner = {f"norm_in.{name}": normed[name] for name in ("r", "w", "bias") if normed}
        outer = {f"norm_out.{name}": normed[name] for name in ("y", "sum") if normed}
        return {**self._widths(self.k, self.columns, 1), **inner, **outer, **self._change_widths()}

    def _change_widths(self) -> dict[str, int]:
        found: dict[str, int] = {"slot": 1} if self.slot else {}
        pieces = [(change, end - begin) for change in self.changes for begin, end in change.spans]
        for number, (change, n) in enumerate(pieces):
            found |= {f"low.{number}": change.rank, f"up.{number}": change.slots * n * change.rank}
            found[f"shift.{number}"] = change.slots * n
        return found


@step_type
class Linear(RowProduct, frozen=True, kw_only=True, tag="linear"):
    """A dense product."""


@step_type
class LinearQ(RowProduct, frozen=True, kw_only=True, tag="linear_q"):
    """A product of float rows or int8 rows with a weight of codes."""


class ExpertProduct(Product, frozen=True, kw_only=True):
    """A product of each row with the matrices of the `topk` of `experts` that index [topk] names: y is [topk, n].

    x is [k], or [topk, k] if x_per_slot; an index outside [0, experts) gives zeros. Without an index, x has a row for
    each expert.
    """

    index: Operand | None = None
    experts: int
    topk: int
    x_per_slot: bool = False

    def widths(self) -> dict[str, int]:
        x = self.k * (self.topk if self.x_per_slot else 1)
        return {**self._widths(x, self.topk * self.columns, self.experts), "index": self.topk}


@step_type
class ExpertLinear(ExpertProduct, frozen=True, kw_only=True, tag="expert_linear"):
    """Dense products with experts."""


@step_type
class ExpertLinearQ(ExpertProduct, frozen=True, kw_only=True, tag="expert_linear_q"):
    """Products with experts whose weights are codes."""


@step_type
class QuantizeRows(Step, frozen=True, kw_only=True, tag="quantize_rows"):
    """x [k] as int8 codes, with a scale and the sum of the codes per group; unsigned: as codes from 0 to 127, with a
    scale and, instead of the sum, the code of zero."""

    OUTPUTS: ClassVar = ("codes", "scales", "sums")
    DTYPES: ClassVar = {"codes": ("i8",)}
    x: Operand
    codes: Operand
    scales: Operand
    sums: Operand
    k: int
    group: int
    unsigned: bool = False

    def widths(self) -> dict[str, int]:
        groups = self.k // self.group
        return {"x": self.k, "codes": self.k, "scales": groups, "sums": groups}

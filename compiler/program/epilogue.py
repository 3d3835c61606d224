"""Fuses a pointwise step into the product that makes its input: gated activations, residual additions, scalings.

    h = linear(x, W); y = pointwise(h[:F], h[F:], body)   ->   y = linear(x, W, epilogue=body)

A body reads columns of the product ("acc:<offset>:<stride>": column offset + stride * c for output column c) and other
operands ("<row stride>:<column stride>"). The product's own result is then never written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from ...runtime.format.program import Operand
from .builder import ProgramBuilder, Record

_PRODUCTS = {"linear", "linear_q", "expert_linear", "expert_linear_q"}
_MAX_PARTS = 2  # products of one output tile that a kernel keeps in registers
_MAX_EXTRAS = 3


def fuse_epilogues(builder: ProgramBuilder, marks: Sequence[int]) -> list[int]:
    """Rewrite the builder's records; a product whose result nobody else reads vanishes into the step that reads it.

    Returns, for each of `marks`, how many of so many first records are left.
    """
    records = builder.records
    uses = Counter(_place(o) for r in records for o in (*r.inputs, *r.outputs))
    made_by = {_place(r.outputs[0]): i for i, r in enumerate(records) if r.op in _PRODUCTS}
    removed: set[int] = set()
    for at, record in enumerate(records):
        if record.op != "pointwise":
            continue
        for place in dict.fromkeys(map(_place, record.inputs)):
            source = made_by.get(place, at)
            here = sum(_place(o) == place for o in (*record.inputs, *record.outputs))
            if source >= at or source in removed or uses[place] != 1 + here:
                continue
            fused = _fuse(records[source], record)
            if fused is not None:
                records[at] = fused
                removed.add(source)
                break
    builder.records = [r for i, r in enumerate(records) if i not in removed]
    return [mark - sum(at < mark for at in removed) for mark in marks]


def _place(operand: Operand) -> tuple[str, str]:
    return operand.space, operand.name


def _fuse(product: Record, point: Record) -> Record | None:
    """The product with the pointwise step as its epilogue, or None where the kernels cannot do that."""
    shape = tuple(point.params["shape"])
    slots = product.params["topk"] if product.op.startswith("expert") else 1
    width = prod(shape) // slots
    out = _Output.of(point)
    if (
        not out.dense
        or (slots > 1 and out.row_stride != slots * width)
        or product.params["rows"] != point.params["rows"]
    ):
        return None
    inputs, extras, parts = [], [], set()
    for operand, text in zip(point.inputs, point.params["inputs"], strict=True):
        _, row_stride, strides = text.split(":")
        steps = [int(s) for s in strides.split(",")] if strides else []
        if _place(operand) == _place(product.outputs[0]):
            offset = operand.offset - product.outputs[0].offset
            stride = _column_stride(shape, steps, slots, product.params["n"])
            if stride is None or int(row_stride) != product.params["n"] * slots:
                return None
            inputs.append(f"acc:{offset}:{stride}")
            parts.add((offset, stride))
        else:
            stride = _column_stride(shape, steps, 1, 0)
            if stride not in (0, 1) or slots > 1:
                return None
            inputs.append(f"{row_stride}:{stride}")
            extras.append(operand)
    if len(parts) > _MAX_PARTS or len(extras) > _MAX_EXTRAS:
        return None
    params = product.params | {
        "epilogue": list(point.params["body"]), "epilogue_inputs": inputs, "width": width, "y_stride": out.row_stride,
    }  # fmt: skip
    operands = [*product.inputs, *extras]
    return Record(product.op, params, operands, point.outputs, -1, point.origin)


def _column_stride(shape: tuple[int, ...], strides: list[int], slots: int, slot_stride: int) -> int | None:
    """The constant step between neighbouring columns of a view, or None. Slots lead, `slot_stride` apart."""
    axes = [(n, s) for n, s in zip(shape, strides, strict=True) if n != 1]
    if slots > 1:
        if not axes or axes[0] != (slots, slot_stride):
            return None
        axes = axes[1:]
    if not axes:
        return 0
    for (_, outer), (n, inner) in pairwise(axes):
        if outer != n * inner:
            return None
    return axes[-1][1]


@dataclass(frozen=True)
class _Output:
    """Where a pointwise step writes: whether its rows are contiguous, and how far apart they begin."""

    dense: bool
    row_stride: int

    @staticmethod
    def of(point: Record) -> _Output:
        _, _, row_stride, strides = point.params["outputs"][0].split(":")
        steps = [int(s) for s in strides.split(",")] if strides else []
        shape = tuple(point.params["shape"])
        return _Output(_column_stride(shape, steps, 1, 0) in (0, 1), int(row_stride))

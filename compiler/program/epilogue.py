"""Fuses a pointwise step into the product that makes its input: gated activations, residual additions, scalings.

    h = linear(x, W); y = pointwise(h[:F], h[F:], body)   ->   y = linear(x, W, epilogue=body)

A body reads columns of the product (`Columns`) and other operands (an `Access` over the columns). The product's own
result is then never written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import prod

from msgspec.structs import replace

from ...runtime.format.access import Access, Columns
from ...runtime.format.program import Operand
from .builder import ProgramBuilder, Record
from .strides import view_strides

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
    shape, out = point.params["shape"], point.params["output"]
    slots = product.params["topk"] if product.op.startswith("expert") else 1
    n, width = product.params["n"], prod(shape) // slots
    if (
        _column_stride(shape, out, 1) not in (0, 1)
        or (slots > 1 and out.row_stride != slots * width)
        or product.params["rows"] != point.params["rows"]
    ):
        return None
    inputs: list[Columns | Access] = []
    extras = []
    for operand, access in zip(point.inputs, point.params["inputs"], strict=True):
        if _place(operand) == _place(product.outputs[0]):
            stride = _column_stride(shape, access, slots, n)
            if stride is None or access.row_stride != n * slots:
                return None
            inputs.append(Columns(operand.offset - product.outputs[0].offset, stride))
        else:
            stride = _column_stride(shape, access, 1)
            if stride not in (0, 1) or slots > 1:
                return None
            inputs.append(replace(access, strides=(stride,)))
            extras.append(operand)
    if len({i for i in inputs if isinstance(i, Columns)}) > _MAX_PARTS or len(extras) > _MAX_EXTRAS:
        return None
    params = product.params | {
        "epilogue": point.params["body"], "epilogue_inputs": tuple(inputs), "width": width, "y_stride": out.row_stride,
    }  # fmt: skip
    operands = [*product.inputs, *extras]
    return Record(product.op, params, operands, point.outputs, -1, point.origin)


def _column_stride(shape: tuple[int, ...], access: Access, slots: int, slot_stride: int = 0) -> int | None:
    """The constant step between neighbouring columns of an operand, or None. Slots lead, `slot_stride` apart."""
    width = prod(shape) // slots
    found = view_strides(shape, access.strides, (slots, width))
    if found is None or (slots > 1 and found[0] != slot_stride):
        return None
    return found[1] if width > 1 else 0

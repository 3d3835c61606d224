"""Fuses a pointwise step into the product that makes its input: gated activations, residual additions, scalings.

    h = linear(x, W); y = pointwise(h[:F], h[F:], body)   ->   y = linear(x, W, epilogue=body)

A body reads columns of the product and other operands (see `Epilogue`). The product's own result is then never written.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from math import prod
from typing import ClassVar

import msgspec

from ...runtime.format.operands import BufferOperand, Operand, OutputOperand
from ..ops.body import Body
from .builder import ProgramBuilder
from .profile import Profile
from .rewrite import StepRewrite
from .steps.linear import Columns, Epilogue, ExpertLinear, ExpertProduct, Extra, Product
from .steps.pointwise import Pointwise
from .strides import Access, view_strides

MAX_PARTS = 2  # products of one output tile that a kernel keeps in registers
MAX_EXTRAS = 3
ADD = Body.parse("t0 = add a0 a1")


@dataclass(frozen=True)
class FuseEpilogues(StepRewrite):
    """Merges a product into the pointwise step of the same section that is the only reader of its result."""

    name: ClassVar[str] = "fuse-epilogues"

    def applies(self, profile: Profile) -> bool:
        return profile.epilogues or profile.adds

    def run(self, builder: ProgramBuilder, profile: Profile) -> int:
        records = builder.records
        uses = Counter(_place(o, r.section) for r in records for o in r.step.operands.values())
        uses.update((BufferOperand, name, "") for name in builder.given_out)
        products = {i: r.step for i, r in enumerate(records) if isinstance(r.step, Product)}
        made_by = {_place(product.y, records[i].section): i for i, product in products.items()}
        removed: set[int] = set()
        for at, record in enumerate(records):
            point = record.step
            if not isinstance(point, Pointwise):
                continue
            for place in dict.fromkeys(_place(o, record.section) for o in point.args):
                source = made_by.get(place, at)
                here = sum(_place(o, record.section) == place for o in (*point.args, point.y))
                if source >= at or source in removed or uses[place] != 1 + here:
                    continue
                if records[source].section != record.section:
                    continue
                fused = _fuse(products[source], point)
                if fused is not None and (profile.epilogues or adds_in_place(fused)):
                    records[at] = replace(record, step=fused)
                    removed.add(source)
                    break
        builder.records = [r for i, r in enumerate(records) if i not in removed]
        return len(removed)


def adds_in_place(product: Product) -> bool:
    """Whether the epilogue of a product with an expert per row is only y = y + product."""
    if not isinstance(product, ExpertLinear) or product.topk > 1 or not product.x_per_slot or product.index is None:
        return False
    return product.extras == (product.y,) and product.epilogue == Epilogue(ADD, (Columns(0, 1), Extra(1)), product.n)


def _place(operand: Operand, section: str = "") -> tuple[type[Operand], str, str]:
    """A key of an operand's place in memory. Sections that give a result of the same name never run together."""
    return type(operand), operand.name, section if isinstance(operand, OutputOperand) else ""


def _fuse(product: Product, point: Pointwise) -> Product | None:
    """The product with the pointwise step as its epilogue; None if the kernels cannot do that."""
    shape, (*walks, out) = point.shape, point.accesses
    slots = product.topk if isinstance(product, ExpertProduct) else 1
    width = prod(shape) // slots
    if (
        _column_stride(shape, out, 1) not in (0, 1)
        or (slots > 1 and out.row_stride != slots * width)
        or product.rows != point.rows
    ):
        return None
    inputs: list[Columns | Extra] = []
    extras: list[Operand] = []
    for operand, access in zip(point.args, walks, strict=True):
        if _place(operand) == _place(product.y):
            stride = _column_stride(shape, access, slots, product.n)
            if stride is None or access.row_stride != product.n * slots:
                return None
            inputs.append(Columns(operand.offset - product.y.offset, stride))
        else:
            stride = _column_stride(shape, access, 1)
            if stride not in (0, 1) or slots > 1:
                return None
            inputs.append(Extra(stride))
            extras.append(operand)
    if len({i for i in inputs if isinstance(i, Columns)}) > MAX_PARTS or len(extras) > MAX_EXTRAS:
        return None
    epilogue = Epilogue(point.body, tuple(inputs), width)
    return msgspec.structs.replace(product, extras=tuple(extras), y=point.y, epilogue=epilogue)


def _column_stride(shape: tuple[int, ...], access: Access, slots: int, slot_stride: int = 0) -> int | None:
    """The stride between neighbouring columns of an operand; None if it is not constant. The first axis is slots,
    `slot_stride` apart."""
    width = prod(shape) // slots
    found = view_strides(shape, access.strides, (slots, width))
    if found is None or (slots > 1 and found[0] != slot_stride):
        return None
    return found[1] if width > 1 else 0

"""Merges the terms of adapters into products: a product's tiles are finished with B (A x) of each row's adapter.

change = expert_linear(low, B, bias, slot); y = linear(x, W, epilogue=.. + change)
    ->   y = linear(x, W, epilogue=.. + change(low, B, bias, slot))

An adapter then costs only one product with A for all layers that read one value. For a few rows a launch costs a GPU
more than its work, so the number of launches decides the cost of adapters there (benchmarks/results/adapters.md).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import msgspec

from ...runtime.format.operands import BufferOperand, Operand
from ..ops.body import Body
from .builder import ProgramBuilder
from .profile import Profile
from .rewrite import StepRewrite
from .steps.base import FLOATS, QuantizedRows, Step
from .steps.linear import AdapterChange, Columns, Epilogue, ExpertLinear, Extra, RowProduct

COPY = Body.parse("t0 = copy a0")


@dataclass(frozen=True)
class JoinAdapters(StepRewrite):
    """Merges products with an expert per row into the product whose epilogue is the only reader of their buffer: one
    for all of its columns, or several for some columns each."""

    name: ClassVar[str] = "join-adapters"

    def applies(self, profile: Profile) -> bool:
        return profile.adapts and profile.epilogues

    def run(self, builder: ProgramBuilder, profile: Profile) -> int:
        records = builder.records
        uses = builder.uses
        writers: dict[str, dict[int, ExpertLinear]] = defaultdict(dict)
        for at, record in enumerate(records):
            if (change := change_of(record.step)) is not None:
                writers[change.y.name][at] = change
        removed: set[int] = set()
        count = 0
        for at, record in enumerate(records):
            product, found = record.step, dict[Operand, list[ExpertLinear]]()
            for extra in _extras(product):
                makers = writers.get(extra.name, {})
                here = all(maker < at and records[maker].section == record.section for maker in makers)
                pieces = _pieces(product, extra, list(makers.values())) if here and makers else []
                slots = {piece.index for each in (pieces, *found.values()) for piece in each}
                if pieces and len(slots) == 1 and uses[extra.name] == len(makers) + 1:
                    found[extra] = pieces
                    removed.update(makers)
            if found:
                records[at] = replace(record, step=joined(product, found))
                count += 1
        builder.records = [r for i, r in enumerate(records) if i not in removed]
        return count


def change_of(step: Step) -> ExpertLinear | None:
    """The step, if it is the product with B of each row's adapter, with a bias and nothing else; None if not."""
    if not isinstance(step, ExpertLinear) or step.topk > 1 or step.index is None:
        return None
    if step.epilogue not in (None, Epilogue(COPY, (Columns(0, 1),), step.n)):  # copied next to other changes
        return None
    plain = step.bias is not None and step.stored.format in FLOATS and not isinstance(step.x, QuantizedRows)
    return step if plain and isinstance(step.y, BufferOperand) else None


def _extras(step: Step) -> list[BufferOperand]:
    """The buffers that the epilogue of a product without an `AdapterChange` reads besides the product, one element per
    column."""
    if not isinstance(step, RowProduct) or step.epilogue is None or step.slot is not None:
        return []
    parts = (part for part in step.epilogue.inputs if isinstance(part, Extra))
    pairs = zip(parts, step.extras, strict=True)
    return [extra for part, extra in pairs if part.stride == 1 and isinstance(extra, BufferOperand)]


def _pieces(product: Step, extra: Operand, makers: Sequence[ExpertLinear]) -> list[ExpertLinear]:
    """The products that make an extra operand, in the order of its columns; empty if they do not make exactly that
    operand."""
    assert isinstance(product, RowProduct)
    steps = sorted(makers, key=lambda step: step.y.offset)
    end = extra.offset
    for step in steps:
        alike = (step.k, step.experts, step.rows) == (steps[0].k, steps[0].experts, product.rows)
        if not alike or (step.y.offset, step.y.stride) != (end, extra.stride):
            return []
        end += step.n
    return steps if end == extra.offset + product.columns else []


def joined(product: Step, found: dict[Operand, list[ExpertLinear]]) -> RowProduct:
    """The product with these extra operands computed in its epilogue."""
    assert isinstance(product, RowProduct) and product.epilogue is not None
    rest, extras = list(product.extras), list[Operand]()
    inputs: list[Columns | Extra | AdapterChange] = []
    made: list[ExpertLinear] = []
    for part in product.epilogue.inputs:
        extra = rest.pop(0) if isinstance(part, Extra) else None
        if extra is not None and extra in found:
            pieces = found[extra]
            ends = (piece.y.offset - extra.offset + piece.n for piece in pieces)
            stored = pieces[0].stored if pieces[0].w.dtype == "u8" else None
            inputs.append(AdapterChange(tuple(ends), pieces[0].k, pieces[0].experts, stored))
            made += pieces
        else:
            inputs.append(part)
            extras += [] if extra is None else [extra]
    return msgspec.structs.replace(
        product,
        extras=tuple(extras),
        epilogue=msgspec.structs.replace(product.epilogue, inputs=tuple(inputs)),
        low=tuple(piece.x for piece in made),  # type: ignore[misc]
        up=tuple(piece.w for piece in made),
        shift=tuple(piece.bias for piece in made),  # type: ignore[misc]
        slot=made[0].index,
    )

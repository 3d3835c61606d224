"""Merges a norm into the product whose result it normalizes: the product's last program may compute both.

h = linear(x, W); y, s = add_rms_norm(h, r, w)   ->   h, y, s = linear(x, W, norm=add_rms_norm(r, w))
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import ClassVar

import msgspec

from ...runtime.format.operands import BufferOperand
from .builder import ProgramBuilder
from .profile import Profile
from .rewrite import StepRewrite
from .steps.base import op_name
from .steps.linear import NormInputs, NormOutputs, RowProduct
from .steps.norm import Norm


@dataclass(frozen=True)
class JoinNorms(StepRewrite):
    """Merges a product into the norm of whole rows that is the only reader of its result: one step of both, in the
    norm's place. Both must be in one section."""

    name: ClassVar[str] = "join-norms"

    def applies(self, profile: Profile) -> bool:
        return profile.joins

    def run(self, builder: ProgramBuilder, profile: Profile) -> int:
        records = builder.records
        reads = Counter(o.name for r in records for o in r.step.operands.values() if isinstance(o, BufferOperand))
        reads.update(builder.given_out)
        products = {i: r.step for i, r in enumerate(records) if isinstance(r.step, RowProduct)}
        made_by = {product.y: i for i, product in products.items()}
        removed: set[int] = set()
        for at, record in enumerate(records):
            norm = record.step
            if not isinstance(norm, Norm) or norm.groups > 1:
                continue
            for given, other in (("x", "r"), ("r", "x")):
                value = getattr(norm, given, None)
                source = made_by.get(value, at) if isinstance(value, BufferOperand) else at
                if source >= at or source in removed or reads[products[source].y.name] != 2:
                    continue
                if records[source].section != record.section:
                    continue
                product = products[source]
                if product.normed is None and product.columns == norm.d and product.rows == norm.rows:
                    records[at] = replace(record, step=_joined(product, norm, other))
                    removed.add(source)
                    break
        builder.records = [r for i, r in enumerate(records) if i not in removed]
        return len(removed)


def _joined(product: RowProduct, norm: Norm, other: str) -> RowProduct:
    """The product with a norm. other: the norm's operand that is added to the product, "" if there is none."""
    ins = NormInputs(getattr(norm, other, None), getattr(norm, "w", None), getattr(norm, "bias", None))
    outs = NormOutputs(norm.y, getattr(norm, "sum", None))  # type: ignore[attr-defined]
    return msgspec.structs.replace(product, norm_in=ins, norm_out=outs, norm=op_name(type(norm)), eps=norm.eps)

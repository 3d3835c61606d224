"""Merges the terms of adapters into products, for back ends whose only epilogue is that sum.

change = expert_linear(low, B, bias, slot); y = linear(x, W); z = pointwise(y, change, body that begins with y + change)
    ->   y = linear(x, W, epilogue=y + change(low, B, bias, slot)); z = pointwise(y, body)

The pointwise step is removed if it does nothing but add. Each removed step saves a barrier of all threads, which costs
more than the work of an adapter's steps for a few rows (benchmarks/results/adapters.md).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from typing import ClassVar

import msgspec

from ...runtime.format.operands import BufferOperand
from ..ops.body import Argument, Body, Instruction
from .adapted_products import COPY, change_of, joined
from .builder import ProgramBuilder, Record
from .epilogue import ADD
from .profile import Profile
from .rewrite import StepRewrite
from .steps.base import Step
from .steps.linear import Columns, Epilogue, ExpertLinear, Extra, RowProduct
from .steps.pointwise import Pointwise
from .strides import view_strides

TILE = 16  # columns that one thread writes: of a change that began in between, two threads would write one tile


def adds_changes(product: RowProduct) -> bool:
    """Whether a product's epilogue is only y = product + the change of each row's adapter."""
    epilogue = product.epilogue
    if epilogue is None or len(product.changes) != 1 or product.extras or product.changes[0].stored is None:
        return False
    ends = (*product.changes[0].ends[:-1], 0)
    plain = epilogue == Epilogue(ADD, (Columns(0, 1), product.changes[0]), product.n)
    return plain and not any(end % TILE for end in ends) and product.changes[0].ends[-1] == product.n


@dataclass(frozen=True)
class PlacedChange:
    """A product with B of each row's adapter, with y at the final place of its columns, and its records: the product,
    and a copy if there is one."""

    step: ExpertLinear
    records: tuple[int, ...]


@dataclass(frozen=True)
class AddChanges(StepRewrite):
    """Lets products add the changes of adapters that pointwise steps would add."""

    name: ClassVar[str] = "add-changes"

    def applies(self, profile: Profile) -> bool:
        return profile.adapts and not profile.epilogues

    def run(self, builder: ProgramBuilder, profile: Profile) -> int:
        records = builder.records
        found = _Found.of(builder)
        removed: set[int] = set()
        count = 0
        for at, record in enumerate(records):
            if not isinstance(record.step, Pointwise):
                continue
            for name in dict.fromkeys(operand.name for operand in record.step.args):
                point, place = records[at].step, found.products.get(name, at)
                if place >= at or at in removed or not isinstance(point, Pointwise):
                    continue
                product = records[place].step
                assert isinstance(product, RowProduct)
                sums = found.sums(point, product)
                pieces = found.pieces(point, product, sums)
                makers = {maker for piece in pieces for maker in piece.records}
                sections = {records[i].section for i in (*makers, place, at)}
                if not pieces or len(sections) > 1 or any(piece.records[0] > place for piece in pieces):
                    continue
                product = joined(_with_extra(product), {_EXTRA: [piece.step for piece in pieces]})
                rest = _without(point, sums)
                if rest.body == COPY and prod(rest.shape) == product.n and _walks_columns(rest, 0, 1):
                    product = msgspec.structs.replace(product, y=rest.y)
                    removed.add(at)
                records[place], records[at] = replace(records[place], step=product), replace(record, step=rest)
                removed |= makers
                count += 1
        builder.records = [r for i, r in enumerate(records) if i not in removed]
        return count


@dataclass(frozen=True)
class _Found:
    """By the names of buffers: how often steps name them, the products that make them, and the changes in them."""

    uses: Counter[str]
    products: dict[str, int]
    changes: dict[str, list[PlacedChange]]

    @staticmethod
    def of(builder: ProgramBuilder) -> _Found:
        """The counts, products and changes in a program."""
        records, uses = builder.records, builder.uses
        named = ((_plain_product(record.step), at) for at, record in enumerate(records))
        products = {product.y.name: at for product, at in named if product is not None}
        return _Found(uses, products, _changes(records, uses))

    def sums(self, point: Pointwise, product: RowProduct) -> dict[int, tuple[int, int]]:
        """The instructions that add a change to columns of the product, with the numbers of both arguments; empty if
        anything else reads the product."""
        read = Counter(o.index for i in point.body.instructions for o in i.operands if isinstance(o, Argument))
        mine = {i for i, operand in enumerate(point.args) if operand.name == product.y.name}
        found: dict[int, tuple[int, int]] = {}
        for number, instruction in enumerate(point.body.instructions):
            pair = [operand.index for operand in instruction.operands if isinstance(operand, Argument)]
            if instruction.opcode != "add" or len(pair) != 2 or any(read[i] != 1 for i in pair):
                continue
            pair.sort(key=lambda i: i not in mine)
            if pair[0] in mine and point.args[pair[1]].name in self.changes:
                found[number] = (pair[0], pair[1])
        everywhere = self.uses[product.y.name] == 1 + len(mine) and {own for own, _ in found.values()} == mine
        return found if everywhere else {}

    def pieces(self, point: Pointwise, product: RowProduct, sums: dict[int, tuple[int, int]]) -> list[PlacedChange]:
        """The changes in the order of the product's columns, if they cover all of them; else an empty list."""
        width, at = prod(point.shape), dict[int, PlacedChange]()
        reads = Counter(point.args[change].name for _, change in sums.values())
        for own, change in sums.values():
            operand = point.args[change]
            made = self.changes[operand.name]
            whole = sum(piece.step.n for piece in made) == width and self.uses[operand.name] == len(made) + 1
            if not whole or reads[operand.name] > 1 or not _walks_columns(point, own, change):
                return []
            for piece in made:
                column = point.args[own].offset - product.y.offset + piece.step.y.offset - operand.offset
                placed = msgspec.structs.replace(piece.step, y=msgspec.structs.replace(_EXTRA, offset=column))
                at[column] = PlacedChange(placed, piece.records)
        pieces = [at[column] for column in sorted(at)]
        ends = [0, *accumulate(piece.step.n for piece in pieces)]
        facts = {(p.step.k, p.step.experts, p.step.rows, p.step.index, p.step.stored) for p in pieces}
        fits = sorted(at) == ends[:-1] and ends[-1] == product.n and not any(end % TILE for end in ends[:-1])
        return pieces if fits and len(facts) == 1 and {product.rows, point.rows} == {pieces[0].step.rows} else []


_EXTRA = BufferOperand("", "f32", 0)  # stands for the sum of all changes until `joined` merges their products


def _with_extra(product: RowProduct) -> RowProduct:
    """The product with one more operand, which it adds."""
    epilogue = Epilogue(ADD, (Columns(0, 1), Extra(1)), product.n)
    return msgspec.structs.replace(product, extras=(_EXTRA,), epilogue=epilogue)


def _plain_product(step: Step) -> RowProduct | None:
    """The step, if it is a product of rows without epilogue or norm that writes a buffer; else None."""
    if not isinstance(step, RowProduct) or not isinstance(step.y, BufferOperand):
        return None
    return None if step.epilogue is not None or step.norm or step.screened else step


def _walks_columns(point: Pointwise, *operands: int) -> bool:
    """Whether these operands of a pointwise step (y is the last one) are contiguous columns in a row per token."""
    walks = (view_strides(point.shape, point.walks[i], (prod(point.shape),)) for i in operands)
    return all(walk == (1,) for walk in walks) and all((*point.args, point.y)[i].stride for i in operands)


def _changes(records: list[Record], uses: Counter[str]) -> dict[str, list[PlacedChange]]:
    """The changes by the buffer that they are written to, directly or by a copy next to other changes."""
    found: dict[str, list[PlacedChange]] = defaultdict(list)
    for at, record in enumerate(records):
        if (change := change_of(record.step)) is not None:
            found[change.y.name].append(PlacedChange(change, (at,)))
        point = record.step
        if not isinstance(point, Pointwise) or point.body != COPY or not isinstance(point.y, BufferOperand):
            continue
        [source] = point.args
        made = found.get(source.name, [])
        alone = len(made) == 1 and uses[source.name] == 2 and prod(point.shape) == made[0].step.n
        if alone and _walks_columns(point, 0, 1) and source.offset == made[0].step.y.offset:
            moved = msgspec.structs.replace(made[0].step, y=point.y)
            found[point.y.name].append(PlacedChange(moved, (*made[0].records, at)))
    return found


def _without(point: Pointwise, sums: dict[int, tuple[int, int]]) -> Pointwise:
    """The step without the additions that products now make."""
    gone = {change for _, change in sums.values()}
    left = [i for i in range(len(point.args)) if i not in gone]
    numbers = {old: new for new, old in enumerate(left)}

    def moved(number: int, instruction: Instruction) -> Instruction:
        if number in sums:
            return Instruction("copy", (Argument(numbers[sums[number][0]]),))
        operands = (Argument(numbers[o.index]) if isinstance(o, Argument) else o for o in instruction.operands)
        return Instruction(instruction.opcode, tuple(operands))

    return msgspec.structs.replace(
        point,
        args=tuple(point.args[i] for i in left),
        walks=(*(point.walks[i] for i in left), point.walks[-1]),
        body=Body(tuple(moved(number, i) for number, i in enumerate(point.body.instructions))),
    )

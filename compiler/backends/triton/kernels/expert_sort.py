"""The kernels before a product with experts that sort its slots (one per row and expert of the row) by expert.

Each expert's slots are padded to whole blocks, so that a tile of the product has rows of one expert only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .....runtime.format.plan import Extent
from ...render import render
from ..bounds.forms import Number
from ..spec import ONE, Arg, LaunchSpec, scratch_arg
from .product import TEMPLATES, WeightProduct


@dataclass(frozen=True)
class SortSource:
    """The slots of a product with experts, sorted into blocks."""

    op: WeightProduct[Any]
    block: int
    padded: bool  # see ProductSource

    @property
    def experts(self) -> int:
        """The number of experts' matrices."""
        return self.op.experts

    @property
    def topk(self) -> int:
        """Experts of a row."""
        return self.op.topk

    @property
    def buckets(self) -> int:
        """A power of two that holds all experts and one bucket for slots without an expert."""
        return 1 << self.op.experts.bit_length()

    def most_blocks(self, rows: str) -> str:
        """The most blocks of slots, as an expression. rows: the name of the number of rows."""
        return self.op.most_blocks(self.block, rows)


def sort_slots(op: WeightProduct[Any], block: int, padding: tuple[Arg, ...]) -> tuple[LaunchSpec, LaunchSpec]:
    """The launches that count the slots of each expert and put them in place, in scratch. block: slots of a block;
    padding: the argument that tells which rows only fill a graph, if there is one."""
    source = render(f"{TEMPLATES}/expert_sort.py.jinja", SortSource(op, block, bool(padding)), op.step)
    grid = (Extent(op.experts + 1), ONE, ONE)
    index = tuple(arg for name, arg in op.operand_args.items() if name == "index_ptr")
    given, counts = (*index, *padding), scratch_arg("counts")
    place = (*given, counts, *sorted_args().values(), op.count)
    return (
        LaunchSpec(source, "expert_count", (*given, counts, op.count), grid, num_warps=4),
        LaunchSpec(source, "expert_place", place, grid, num_warps=4),
    )


def sorted_args() -> dict[str, Arg]:
    """The arguments with the slots of each block and the expert of each block, which the launches write."""
    return {"slots_ptr": scratch_arg("slots"), "experts_ptr": scratch_arg("experts")}


def sort_scratch(op: WeightProduct[Any], block: int, tokens: int) -> dict[str, int]:
    """Bytes of the slots of `tokens` rows of x, in blocks, and of the counts that find their places."""
    blocks = op.blocks(block).value({op.num_rows: tokens})
    return {"counts": 4 * (op.experts + 1), "slots": 4 * blocks * block, "experts": 4 * blocks}


def sort_values(op: WeightProduct[Any], sizes: Mapping[str, Number]) -> dict[str, tuple[Number, Number]]:
    """The least and the largest integer in each scratch area; -1 stands for no slot and no expert."""
    slots = sizes[op.num_rows] * op.topk
    return {"slots": (-1, slots - 1), "counts": (0, slots), "experts": (-1, op.experts)}

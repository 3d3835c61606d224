"""Converts adapters that change each expert separately, as written when each expert was a module, to changes of the one
weight that now holds all experts of a layer."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from .adapter import Adapter, Change, LowRank, side_by_side

# the layer, the expert, and which of its matrices, by the names of the former modules
_ALONE = re.compile(r"(?:.*\.)?layers\.(\d+)\..*\bexperts\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight")
_TOGETHER = re.compile(r"(?:.*\.)?layers\.(\d+)\..*\bexperts\.(gate_up_proj|down_proj)(?:\.weight)?")
_MATRIX = {
    "gate_proj": ("gate_up_proj", 0), "w1": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1),
    "w3": ("gate_up_proj", 1), "down_proj": ("down_proj", 0), "w2": ("down_proj", 0),
}  # fmt: skip
_HALVES = {"gate_up_proj": 2, "down_proj": 1}


def with_experts_together(adapter: Adapter, shapes: Mapping[str, Sequence[int]]) -> Adapter:
    """The adapter with one change for all experts of a layer, where it has one per expert and the model has one weight.

    shapes: the model's weights by name, [experts, n, k] for experts. An expert that the adapter does not change gets
    zeros. A change that fits no weight stays as it is.
    """
    known = {found.groups(): name for name in shapes if (found := _TOGETHER.fullmatch(name)) and len(shapes[name]) == 3}
    groups: dict[tuple[str, str], dict[tuple[int, int], LowRank]] = defaultdict(dict)
    rest: dict[str, Change] = {}
    for name, change in adapter.changes.items():
        found = _ALONE.fullmatch(name)
        matrix, half = _MATRIX[found[3]] if found else ("", 0)
        weight = known.get((found[1], matrix)) if found else None
        low_rank = change.low_rank
        if found is None or weight is None or low_rank is None or not change.is_product or change.transposed:
            rest[name] = change
            continue
        experts, n, k = shapes[weight]
        rows = n // _HALVES[matrix]
        if (
            int(found[2]) >= experts
            or (low_rank.b.shape[-2], low_rank.a.shape[-1]) != (rows, k)
            or low_rank.rank > max(rows, k)
        ):
            rest[name] = change
            continue
        groups[weight, matrix][int(found[2]), half] = low_rank
    together = {
        weight: Change(low_rank=_joined(parts, shapes[weight], _HALVES[matrix]))
        for (weight, matrix), parts in groups.items()
    }
    return replace(adapter, changes={**rest, **together}) if together else adapter


def _joined(parts: Mapping[tuple[int, int], LowRank], shape: Sequence[int], halves: int) -> LowRank:
    """One pair [experts, r, k] and [experts, n, r], for gate and up together or for a single matrix."""
    experts, n, k = shape
    found: list[LowRank] = []
    for which in range(halves):
        own = {expert: part for (expert, half), part in parts.items() if half == which}
        rank = max((part.rank for part in own.values()), default=0)
        a, b = np.zeros((experts, rank, k), np.float32), np.zeros((experts, n // halves, rank), np.float32)
        for expert, part in own.items():
            a[expert, : part.rank], b[expert, :, : part.rank] = part.a, part.b * np.float32(part.scale)
        found.append(LowRank(a, b, 1.0))
    return side_by_side(found)

"""Adapters that change experts one by one, as they were written when each was a module: as changes of the one weight
that all experts of a layer are today."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from .adapter import Adapter, Change, LowRank

# the layer, the expert, and which of its matrices: by the names of most models, and by Mixtral's
_ALONE = re.compile(r"(?:.*\.)?layers\.(\d+)\..*\bexperts\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight")
_TOGETHER = re.compile(r"(?:.*\.)?layers\.(\d+)\..*\bexperts\.(gate_up_proj|down_proj)(?:\.weight)?")
_MATRIX = {
    "gate_proj": ("gate_up_proj", 0), "w1": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1),
    "w3": ("gate_up_proj", 1), "down_proj": ("down_proj", 0), "w2": ("down_proj", 0),
}  # fmt: skip


def with_experts_together(adapter: Adapter, shapes: Mapping[str, Sequence[int]]) -> Adapter:
    """The adapter with one change for all experts of a layer, where it has one for each and the model has one weight.

    shapes: of the model's weights, by name: of experts [experts, n, k]. An expert that the adapter leaves alone is left
    alone. What fits no weight stays as it is.
    """
    known = {found.groups(): name for name in shapes if (found := _TOGETHER.fullmatch(name)) and len(shapes[name]) == 3}
    groups: dict[str, dict[tuple[int, int], LowRank]] = defaultdict(dict)
    rest: dict[str, Change] = {}
    for name, change in adapter.changes.items():
        found = _ALONE.fullmatch(name)
        matrix, half = _MATRIX[found[3]] if found else ("", 0)
        weight = known.get((found[1], matrix)) if found else None
        low_rank = change.low_rank
        if found is None or weight is None or low_rank is None or change != Change(low_rank=low_rank):
            rest[name] = change
            continue
        experts, n, k = shapes[weight]
        rows = n // 2 if matrix == "gate_up_proj" else n
        if int(found[2]) >= experts or (low_rank.b.shape[-2], low_rank.a.shape[-1]) != (rows, k):
            rest[name] = change
            continue
        groups[weight][int(found[2]), half] = low_rank
    together = {weight: Change(low_rank=_joined(parts, shapes[weight])) for weight, parts in groups.items()}
    return replace(adapter, changes={**rest, **together}) if together else adapter


def _joined(parts: Mapping[tuple[int, int], LowRank], shape: Sequence[int]) -> LowRank:
    """One pair [experts, r, k] and [experts, n, r]: gate's ranks come before up's, and each has rows of its own."""
    experts, n, k = shape
    ranks = [max((part.rank for (_, half), part in parts.items() if half == which), default=0) for which in (0, 1)]
    a = np.zeros((experts, sum(ranks), k), np.float32)
    b = np.zeros((experts, n, sum(ranks)), np.float32)
    for (expert, half), part in parts.items():
        rank, row = ranks[0] * half, n // 2 * half
        a[expert, rank : rank + part.rank] = part.a
        b[expert, row : row + part.b.shape[0], rank : rank + part.rank] = part.b * np.float32(part.scale)
    return LowRank(a, b, 1.0)

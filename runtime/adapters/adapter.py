"""Adapters as icc sees them, whatever file they come from: what changes in which weight of a model."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class LowRank:
    """scale * B A is added to a weight W [out, in], so that y = x W^T + scale * B (A x).

    a [.., r, in], b [.., out, r], float32; of experts with a leading axis, one pair for each. scale: alpha / r, or
    alpha / sqrt(r) (rsLoRA, Kalajdzievski 2023, arXiv:2312.03732).
    """

    a: np.ndarray
    b: np.ndarray
    scale: float

    @property
    def rank(self) -> int:
        """Rows of A."""
        return self.a.shape[-2]


def side_by_side(parts: Sequence[LowRank]) -> LowRank:
    """What changes a weight that is several, one above the other: each part has ranks and rows of its own."""
    rows, ranks = sum(part.b.shape[-2] for part in parts), sum(part.rank for part in parts)
    b = np.zeros((*parts[0].b.shape[:-2], rows, ranks), np.float32)
    row = rank = 0
    for part in parts:
        count = part.b.shape[-2]
        b[..., row : row + count, rank : rank + part.rank] = part.b * np.float32(part.scale)
        row, rank = row + count, rank + part.rank
    return LowRank(np.concatenate([part.a for part in parts], axis=-2), b, 1.0)


@dataclass(frozen=True)
class RowChange:
    """New values [len(ids), width] for some rows of an embedding (trainable tokens)."""

    ids: tuple[int, ...]
    values: np.ndarray


@dataclass(frozen=True)
class Start:
    """How the base was changed before A and B were trained, where that follows from the base.

    kind: PEFT's name. "pissa", "olora": what A and B began as was taken from it. "loftq": it was rounded to `bits` (4:
    NF4, 8: LLM.int8), `iterations` times, each time less what A and B began as.
    """

    kind: str
    bits: int = 0
    iterations: int = 0


@dataclass(frozen=True)
class Change:
    """What an adapter does to one weight, in this order; None for what it leaves alone.

    whole: another weight takes its place, perhaps of another vocabulary; with more than it, in all layers that share
    it. rows: some of its rows. start: see there. low_rank: what is added. magnitude: [out], which each row is scaled to
    the length of afterwards (DoRA, Liu et al. 2024, arXiv:2402.09353). bias: [out], added to what the layer gives.
    transposed: the base stores the weight as [in, out] (`whole` too), as conv1d layers of GPT-2 do, and as embeddings
    that magnitudes scale. frozen: `whole` was not trained: it is the model's own, or has more or other rows for new
    tokens.
    """

    whole: np.ndarray | None = None
    rows: RowChange | None = None
    start: Start | None = None
    low_rank: LowRank | None = None
    magnitude: np.ndarray | None = None
    bias: np.ndarray | None = None
    transposed: bool = False
    frozen: bool = False

    @property
    def is_product(self) -> bool:
        """Whether B A is added, and nothing else is done."""
        others = (self.whole, self.rows, self.start, self.magnitude, self.bias)
        return self.low_rank is not None and all(one is None for one in others)

    @property
    def is_idle(self) -> bool:
        """Whether it leaves every weight as it is: B is all zeros, as of layers that training never read."""
        return self.is_product and self.low_rank is not None and not self.low_rank.b.any()


@dataclass(frozen=True)
class Adapter:
    """An adapter that was read.

    path: the directory or file. digest: 32 bytes of all that is in it. base: the name of the model that it was trained
    for, "" where it does not say. invocation: the tokens from which on it counts (aLoRA); () for from the beginning.
    changes: by the name of the weight, as the model has it: model.layers.0.self_attn.q_proj.weight.
    """

    path: Path
    digest: bytes
    base: str
    invocation: tuple[int, ...]
    changes: Mapping[str, Change]
    stamp: tuple[int, ...] = ()

    @property
    def rank(self) -> int:
        """The largest of its ranks; 0 if it has no low-rank change."""
        return max((change.low_rank.rank for change in self.changes.values() if change.low_rank), default=0)

    def begin(self, prompt: Sequence[int]) -> int | None:
        """The position from which it counts: that of the last invocation tokens in the prompt (aLoRA, Greenewald et al.
        2025, arXiv:2504.12397), None where they are not there; 0 for others."""
        tokens = self.invocation
        if not tokens:
            return 0
        size = len(tokens)
        found = (at for at in range(len(prompt) - size, -1, -1) if tuple(prompt[at : at + size]) == tokens)
        return next(found, None)


def told_idle(adapter: Adapter, names: Sequence[str]) -> str:
    """What to tell of changes that were left out, by the names of their weights; "" where there are none."""
    if not names:
        return ""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{adapter.path}: {names[0]}{more} left out: nothing here reads it, and its B is all zeros"


def named_as(adapter: Adapter, known: Collection[str]) -> Adapter:
    """The adapter with names of weights as the model has them, `known`: PEFT names them from the class that it was
    trained in, where a model with a head has one word more in front ("model.") than the same without."""
    names = set(known)
    if any(name in names for name in adapter.changes):
        return adapter
    first = {name.partition(".")[0] for name in known}
    shorter = {name: name.partition(".")[2] for name in adapter.changes}
    longer = [{name: f"{word}.{name}" for name in adapter.changes} for word in sorted(first)]
    for renamed in (shorter, *longer):
        if any(name in names for name in renamed.values()):
            return replace(adapter, changes={renamed[name]: change for name, change in adapter.changes.items()})
    return adapter

"""The adapters of a model, independent of their file format: which weights change, and how."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class LowRank:
    """scale * B A is added to a weight W [out, in], so that y = x W^T + scale * B (A x).

    a [.., r, in], b [.., out, r], float32; for experts, a leading axis holds one pair per expert. scale: alpha / r, or
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
    """One change for a weight that stacks several parts along its rows: each part keeps its own ranks and rows."""
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
    """How the base weight was changed before A and B were trained, if that can be computed from the base weight.

    kind: PEFT's name. "pissa", "olora": the initial B A was subtracted from the weight. "loftq": the weight less the
    initial B A was quantized to `bits` (4: NF4, 8: LLM.int8), `iterations` times.
    """

    kind: str
    bits: int = 0
    iterations: int = 0


@dataclass(frozen=True)
class Change:
    """What an adapter does to one weight, applied in the order of the fields; None: the adapter does not do this.

    whole: a weight that replaces it, perhaps for another vocabulary size; if other changes come with it, it is replaced
    in all layers that share it. rows: new values of some rows. start: see Start. low_rank: the product that is added.
    magnitude: [out], the norm to which each row is scaled afterwards (DoRA, Liu et al. 2024, arXiv:2402.09353). bias:
    [out], added to the layer's output. transposed: the base stores the weight as [in, out] (`whole` too), as in conv1d
    layers of GPT-2 and in embeddings with magnitudes. frozen: `whole` was not trained: it is the base model's weight,
    perhaps with rows for new tokens.
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
        """Whether the change has no effect: B is all zeros, as in layers that training never used."""
        return self.is_product and self.low_rank is not None and not self.low_rank.b.any()


@dataclass(frozen=True)
class Adapter:
    """An adapter that was read from its file or directory.

    path: the directory or file. digest: 32 bytes, a hash of its contents. base: the name of the model that it was
    trained for, "" if it does not say. invocation: the tokens from which on the adapter is active (aLoRA); (): it is
    active from the first token. changes: by the model's name of the weight, such as
    model.layers.0.self_attn.q_proj.weight.
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
        """The position from which the adapter is active: where the invocation tokens begin for the last time in the
        prompt (aLoRA, Greenewald et al. 2025, arXiv:2504.12397), None if they do not occur; 0 for an adapter without
        invocation tokens."""
        tokens = self.invocation
        if not tokens:
            return 0
        size = len(tokens)
        found = (at for at in range(len(prompt) - size, -1, -1) if tuple(prompt[at : at + size]) == tokens)
        return next(found, None)


def told_idle(adapter: Adapter, names: Sequence[str]) -> str:
    """A note about the changes that were left out, given the names of their weights; "" if there are none."""
    if not names:
        return ""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{adapter.path}: {names[0]}{more} left out: nothing here reads it, and its B is all zeros"


def named_as(adapter: Adapter, known: Collection[str]) -> Adapter:
    """The adapter with its weights renamed to the model's names, `known`. PEFT takes names from the class that was
    trained, and a model with a head has one more prefix ("model.") than the same model without."""
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

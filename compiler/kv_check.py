"""For tests of a KV format: whether its reference keeps its word, and the logits that right kernels give over it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from .kv_formats import KVFormat, find_kv_format

if TYPE_CHECKING:
    from .graph.graph import Graph

_LEADING = (5, 3)
_MOST_LOST = 0.7  # of normal vectors, as norms; 2 bits lose 0.33


def check_kv_format(form: KVFormat, dim: int = 24) -> None:
    """ValueError where `encode` and `decode` of vectors of `dim` elements give other shapes or types than `numbers`
    says, vectors far from those that were given, or a number for NaN."""
    x = torch.randn(*_LEADING, dim, generator=torch.Generator().manual_seed(0))
    made = form.encode(x)
    if not (isinstance(made, tuple) and len(made) == 2):
        raise ValueError(f"{form.name}: encode must give elements and what lies beside them, and gives {type(made)}")
    codes, beside = made
    numbers = form.numbers
    _expect(form, "elements", codes, -(-dim // (numbers.per_byte or 1)), numbers.item_size)
    if numbers.scaled:
        _expect(form, "what lies beside them", beside, *((2, 2) if numbers.per_byte else (1, 4)))
    elif beside is not None:
        raise ValueError(f"{form.name}: encode must give None beside elements without scales")
    kept = form.kept(x)
    if kept.shape != x.shape or kept.dtype != torch.float32:
        gives = f"{kept.dtype} {tuple(kept.shape)}"
        raise ValueError(f"{form.name}: decode must give float32 {tuple(x.shape)}, not {gives}")
    if (kept - x).norm() > _MOST_LOST * x.norm():
        raise ValueError(f"{form.name}: what is kept is far from what was given")
    x[0, 0, 1] = float("nan")
    if form.kept(x)[0, 0, 1].isfinite():
        raise ValueError(f"{form.name}: NaN is kept as a number")


def cached_logits(model: Path, ids: Sequence[int], form: str) -> tuple[np.ndarray, np.ndarray]:
    """The logits [tokens, vocabulary], float32, of a model over caches of the KV format `form`, and over exact ones.

    An engine with right kernels is nearer to the first than these are to each other.
    """
    from ..passes import pipelines
    from ..passes.base import PassContext
    from ..passes.manager import run_passes
    from .frontend.load import load_graph

    graph = load_graph(model)
    for phase in (pipelines.canonicalize(), pipelines.attention()):
        run_passes(graph, phase, PassContext())
    return rounded_logits(graph, ids, form)


def rounded_logits(graph: Graph, ids: Sequence[int], form: str) -> tuple[np.ndarray, np.ndarray]:
    """As `cached_logits`, of a graph whose attention is paged."""
    from ..passes.quantize.cache_damage import cache_readers, rounding
    from .graph.together import MODEL, run_together

    change = rounding(find_kv_format(form))
    rounded = {node: change for readers in cache_readers(graph).values() for node in readers}
    logits = {made.variant: made.logits.numpy() for made in run_together(graph, [ids], [rounded])}
    return logits[0], logits[MODEL]


def _expect(form: KVFormat, what: str, found: object, width: int, item_bytes: int) -> None:
    if not isinstance(found, torch.Tensor):
        raise ValueError(f"{form.name}: {what} must be a tensor, not {found!r}")
    if tuple(found.shape) != (*_LEADING, width) or found.element_size() != item_bytes:
        is_now = f"{found.dtype} {tuple(found.shape)}"
        raise ValueError(f"{form.name}: {what} must be [.., {width}] of {item_bytes} bytes each, not {is_now}")

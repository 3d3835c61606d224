"""For tests of a KV format: check its reference, and compute the logits that correct kernels give with it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from .kv_formats import KVFormat, find_kv_format, read_cache_option

if TYPE_CHECKING:
    from .graph.graph import Graph

_LEADING = (5, 3)
_SAME_CODES = 0.97  # other values lie between two codes and may be rounded differently
_MOST_LOST = 0.7  # relative norm of the error of normal vectors; 2 bits lose 0.33


def check_kv_format(form: KVFormat, dim: int = 24) -> None:
    """Raise ValueError if `encode` and `decode` of vectors of `dim` elements give other shapes or types than `numbers`
    says, vectors far from the originals, or a number for NaN."""
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
        raise ValueError(f"{form.name}: decoded vectors are far from the originals")
    x[0, 0, 1] = float("nan")
    if form.kept(x)[0, 0, 1].isfinite():
        raise ValueError(f"{form.name}: NaN is kept as a number")


def check_triton_codes(form: KVFormat) -> None:
    """Raise ValueError if the Triton macros of an 8-bit format give other codes than `encode`, decode them to other
    numbers than `decode`, or give a number for NaN. Codes may differ by a step if a value lies between two.

    Runs in Triton's interpreter: the environment needs TRITON_INTERPRET=1 before triton is imported (RuntimeError).
    """
    from .backends.triton.cache_check import interpreted_codes

    if form.numbers.bits != 8:
        raise ValueError(f"{form.name}: elements of {form.numbers.bits} bits; this check handles only 8 bits")
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))
    x[3], x[5, 7] = 0.0, float("nan")
    sound = torch.arange(16) != 5
    codes, scales, values = interpreted_codes(form.name, x, form.numbers.scaled)
    wanted, beside = form.encode(x[sound])
    if not torch.allclose(values[sound], form.decode(codes[sound], scales[sound], 32), rtol=1e-3, atol=1e-6):
        raise ValueError(f"{form.name}: `unpack` gives other numbers than decode")
    if beside is not None and not torch.allclose(scales[sound], beside, rtol=1e-3, atol=1e-6):
        raise ValueError(f"{form.name}: `quantize` gives other scales than encode")
    same = (codes[sound] == wanted).float().mean()
    if same < _SAME_CODES:
        raise ValueError(f"{form.name}: of the codes that `quantize` gives, {float(same):.0%} are those of encode")
    if values[5, 7].isfinite():
        raise ValueError(f"{form.name}: NaN is kept as a number by `quantize`")


def cached_logits(model: str | Path, ids: Sequence[int], form: str) -> tuple[np.ndarray, np.ndarray]:
    """The logits [tokens, vocabulary], float32, of a model with caches of the KV format `form`, and with exact caches.

    model: a model that `icc compile` takes. ids: the tokens of one text. form: a format's name for `--kv-cache`. An
    engine with correct kernels is nearer to the first logits than these are to the second. UsageError if there is no
    such format, UnsupportedModel if icc cannot compile the model.
    """
    from ..passes import pipelines
    from ..passes.base import PassContext
    from ..passes.manager import run_passes
    from .frontend.load import load_graph

    name = read_cache_option(form)
    graph = load_graph(Path(model))
    for phase in (pipelines.canonicalize(), pipelines.attention()):
        run_passes(graph, phase, PassContext())
    return rounded_logits(graph, ids, name)


def rounded_logits(graph: Graph, ids: Sequence[int], form: str) -> tuple[np.ndarray, np.ndarray]:
    """As `cached_logits`, of a graph whose attention is paged. form: the format's own name, `i8` for `int8`."""
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

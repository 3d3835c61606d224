"""Measures the damage of fewer bits in each layer's KV cache to the model's predictions, for `--kv-bits`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from ...compiler.graph.graph import Graph, attention_spec
from ...compiler.graph.together import Change, Variant
from ...compiler.ops import OPS
from ...compiler.ops.attention import rotate
from ..allocation import Curve, Option
from .damage import Progress, divergences, spread

PAGED = OPS["paged_attention"].overload
_PROBED = 12_000  # tokens of all variants together
_LEAST, _MOST = 64, 512  # tokens of a variant
_SEQUENCES = 2


class CacheRounding(Protocol):
    """The part of a KV format that this module uses."""

    @property
    def name(self) -> str:
        """The format's name in programs, such as i8."""
        ...

    def kept(self, x: Tensor) -> Tensor:
        """Vectors [..., dim] after rounding by the cache, float32."""
        ...


Sizes = Mapping[int, Sequence[tuple[CacheRounding, int]]]
"""The formats of each cache, by its layer's number in the graph, with the bytes of each. The first format is
lossless."""


def measure_caches(
    graph: Graph, sizes: Sizes, sequences: Sequence[Sequence[int]], progress: Progress
) -> tuple[Curve, ...]:
    """Curves measured as the KL divergence of the predictions of `graph`, whose attention is paged, if only one layer's
    cache is rounded. sequences: token ids for calibration."""
    readers = cache_readers(graph)
    rounded = [(layer, form) for layer, options in sizes.items() for form, _ in options[1:]]
    variants: list[Variant] = [dict.fromkeys(readers[layer], rounding(form)) for layer, form in rounded]
    tokens = min(max(_PROBED // max(1, len(variants)), _LEAST), _MOST) // _SEQUENCES
    ids = [list(sequence[:tokens]) for sequence in spread(sequences, _SEQUENCES)]
    heard = partial(progress, "measuring what fewer bits of each cache do to predictions")
    found = dict(zip(rounded, divergences(graph, ids, variants, heard), strict=True))
    return curves(sizes, lambda layer, form, nbytes: max(found[layer, form], 0.0))


def guess_caches(sizes: Sizes) -> tuple[Curve, ...]:
    """Curves that assume equally sensitive layers, for a plan without weights: damage falls to a quarter per bit."""
    largest = max((options[0][1] for options in sizes.values()), default=1)
    return curves(sizes, lambda layer, form, nbytes: largest * 4.0 ** (-16 * nbytes / sizes[layer][0][1]))


def curves(sizes: Sizes, damage: Callable[[int, CacheRounding, int], float]) -> tuple[Curve, ...]:
    """One curve per cache, in order; its first format has no damage."""
    return tuple(
        Curve(
            f"layer {layer}",
            tuple(
                Option(form.name, nbytes, damage(layer, form, nbytes) if number else 0.0)
                for number, (form, nbytes) in enumerate(options)
            ),
        )
        for layer, options in sizes.items()
    )


def cache_readers(graph: Graph) -> dict[int, list[fx.Node]]:
    """The calls that read each cache, by its layer's number, for caches that keep tokens beyond a step."""
    found: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.target is PAGED and not attention_spec(node).within_step:
            found.setdefault(attention_spec(node).layer, []).append(node)
    return found


def rounding(form: CacheRounding) -> Change:
    """A change of attention: its keys, which are rotated first, and values are rounded as a cache of that format
    does."""

    def changed(args: list[Any]) -> list[Any]:
        names = list(OPS["paged_attention"].parameters)
        given: dict[str, Any] = dict(zip(names, args, strict=False))
        k, v, positions = given["k"], given["v"], given["positions"]
        cos, sin = given.get("k_cos"), given.get("k_sin")
        width = v.shape[-1]
        latent = cos is None and width <= k.shape[-1] and torch.equal(k[..., :width], v)  # kept once
        if cos is not None and sin is not None:
            k = rotate(k, cos[positions], sin[positions], given["spec"].rope)
        k = form.kept(k)
        v = k[..., :width] if latent else form.kept(v)
        return list(OPS["paged_attention"].ordered(**{**given, "k": k, "v": v, "k_cos": None, "k_sin": None}))

    return changed

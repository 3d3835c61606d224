"""How an engine stores what it keeps of sequences: the number formats of its KV cache and its recurrent states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..passes.allocation import Allocation, allocate
from ..passes.quantize.cache_damage import CacheRounding, Progress, Sizes, cache_readers, guess_caches, measure_caches
from ..runtime.format.manifest import Limits
from .backends.base import Backend
from .errors import UsageError
from .graph.graph import Graph
from .kv_formats import narrowing, read_cache_option
from .ops import OPS
from .options import CompileOptions
from .program.context import LowerOptions
from .program.lower import lower

_ROUNDED = {OPS[name].overload for name in ("gated_scan", "selective_scan")}  # ops whose states are worth halving


def lower_options(graph: Graph, options: CompileOptions, backend: Backend, limits: Limits) -> LowerOptions:
    """The options of the lowering; UsageError if --state-cache is given and changes no state."""
    if options.state_cache != "f32" and not any(node.target in _ROUNDED for node in graph.nodes):
        raise UsageError(
            f"--state-cache {options.state_cache}: no layer of the model has a matrix, or a vector per channel, as its "
            "state; what others keep is little, and stays float32",
            "leave --state-cache out",
        )
    kv_dtype = read_cache_option(options.kv_cache) or backend.kv_dtype
    return LowerOptions(kv_dtype, backend.profile, max_seq_len=limits.max_seq_len, state_dtype=options.state_cache)


def choose_caches(
    graph: Graph,
    whole: Graph,
    lowering: LowerOptions,
    backend: Backend,
    bits: float,
    sequences: Sequence[Sequence[int]],
    progress: Progress = lambda text, done, total: None,
) -> tuple[LowerOptions, Allocation]:
    """The cache types of the layers for --kv-bits, and the alternatives. graph: with paged attention. whole: the same
    graph before it was divided among ranks; its predictions are measured, so that the choice does not depend on the
    number of ranks.

    bits: the average bits per number of a sequence of full length, with scales. sequences: token ids for calibration;
    if there are none, layers count as equally sensitive. UsageError if nothing is cached, or the smallest types do not
    fit.
    """
    sizes, numbers = _sizes(graph, lowering, backend)
    if not numbers:
        raise UsageError("--kv-bits: no layer of the model keeps keys and values", "leave --kv-bits out")
    budget = int(bits * numbers / 8)
    least = sum(min(nbytes for _, nbytes in options) for options in sizes.values())
    if least > budget:
        most = 8 * least / numbers
        raise UsageError(f"--kv-bits {bits:g}: the smallest types take {most:.4g}", f"give {most + 0.005:.2f} or more")
    curves = measure_caches(whole, sizes, sequences, progress) if sequences else guess_caches(sizes)
    allocation = allocate(curves, budget)
    chosen = {layer: option.name for layer, option in zip(sizes, allocation.options, strict=True)}
    return replace(lowering, kv_dtypes=chosen), allocation


def _sizes(graph: Graph, lowering: LowerOptions, backend: Backend) -> tuple[Sizes, int]:
    """Bytes of each layer's cache for a sequence of full length, by type, for the types that the back end has; and how
    many numbers all caches together hold."""
    lowered = lower(graph, lowering)
    kv = lowered.program.kv
    sizes: dict[int, list[tuple[CacheRounding, int]]] = {}
    numbers = 0
    for layer in cache_readers(graph):
        number = lowered.kv_layers[layer]
        group = kv.groups[kv.group_of(number)]
        tokens, held = sum(map(len, group.policy.kept(lowering.max_seq_len))), group.layers[number]
        numbers += tokens * held.kv_heads * (held.key_dim + (0 if held.shared else held.value_dim))
        sizes[layer] = [
            (form, -(-cached.block_bytes(group.block_size, form.numbers) * tokens // group.block_size))
            for form in narrowing(lowering.kv_dtype)
            for cached in (form.layer(held),)
            if not backend.cache_refusal(form.name, cached)
        ]
    return sizes, numbers

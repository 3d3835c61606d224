"""How an engine keeps what sequences leave behind: the numbers of its KV cache and of its recurrent states."""

from __future__ import annotations

from ..runtime.format.manifest import Limits
from .backends.base import Backend
from .errors import UsageError
from .graph.graph import Graph
from .ops import OPS
from .options import KV_DTYPES, CompileOptions
from .program.context import LowerOptions

_ROUNDED = {OPS[name].overload for name in ("gated_scan", "selective_scan")}  # states that are worth halving


def lower_options(graph: Graph, options: CompileOptions, backend: Backend, limits: Limits) -> LowerOptions:
    """What the program is made for; UsageError where --state-cache is given and no state is stored otherwise for it."""
    if options.state_cache != "f32" and not any(node.target in _ROUNDED for node in graph.nodes):
        raise UsageError(
            f"--state-cache {options.state_cache}: no layer of the model has a matrix, or a vector per channel, as its "
            "state; what others keep is little, and stays float32",
            "leave --state-cache out",
        )
    kv_dtype = KV_DTYPES[options.kv_cache] or backend.kv_dtype
    return LowerOptions(kv_dtype, backend.profile, max_seq_len=limits.max_seq_len, state_dtype=options.state_cache)

"""llama.cpp's names of the matrices of a model, so that its adapters can be read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .....runtime.adapters.gguf import GgufNames
from ....errors import UnsupportedModel
from .architectures import architectures_of
from .arrangement import Arrangement
from .names import places
from .source import GgufFile

if TYPE_CHECKING:
    from ..source import ModelSource

_HALVES = ("gate", "up")


def names_of(source: ModelSource, parameters: Mapping[str, Sequence[int]]) -> GgufNames | None:
    """See `gguf_names`. For a GGUF file, the architecture is the one that the file states. None as there."""
    arch = source.container.metadata.get("general.architecture", "") if isinstance(source, GgufFile) else ""
    return gguf_names(source.config, parameters, arch)


def gguf_names(config: Any, parameters: Mapping[str, Sequence[int]], arch: str = "") -> GgufNames | None:
    """llama.cpp's names of matrices [.., N, K], given their names and shapes; None for a model that llama.cpp's table
    lacks. arch: its architecture; "": the most common one of the model's type.

    A matrix whose conversion does more than reorder rows is left out.
    """
    config = config.get_text_config()
    known = dict(architectures_of(config.model_type))
    if not known:
        return None
    arch = arch if arch in known else next(iter(known))
    arrangement = Arrangement(arch, known[arch], (), config)
    try:
        found = places(arch, known[arch], (), parameters, config, arrangement.processor)
    except UnsupportedModel:
        return None
    arrangement.tensors = found.keys()  # names of the tensors of a file of this model
    tensors: dict[str, dict[str, str]] = defaultdict(dict)
    for tensor, place in found.items():
        parameter, _, half = place.partition("#")
        part = half or next((name for name in _HALVES if f"ffn_{name}_exps" in tensor), "")
        if parameter in parameters and tensor.endswith(".weight"):
            tensors[parameter].setdefault(part, tensor)
    names: dict[str, tuple[str, ...]] = {}
    orders: dict[str, np.ndarray] = {}
    turned: set[str] = set()
    for parameter, parts in tensors.items():
        shape = parameters[parameter]
        halves = [parts[part] for part in _HALVES if part in parts]
        whole = halves if len(halves) > 1 else [*parts.values()][:1]  # files may have one matrix, or two
        if len(shape) < 2:
            continue
        if len(whole) > 1 or len(shape) > 2:
            if arrangement.turned or arrangement.between is not None:
                continue
            names[parameter] = tuple(whole)
            continue
        rows, columns = shape
        found_order = arrangement.order(whole[0], rows, columns)
        if found_order is not None:
            names[parameter], (order, is_turned) = tuple(whole), found_order
            if len(order):
                orders[parameter] = order
            if is_turned:
                turned.add(parameter)
    return GgufNames(arch, names, orders, frozenset(turned))

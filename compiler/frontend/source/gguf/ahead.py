"""The layer for multi-token prediction of a GGUF file: llama.cpp's `nextn`, in the first block after the model's own
(`nextn_predict_layers`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .....runtime.format.gguf import GgufContainer, GgufTensor
from ....weights.handles import Weight
from .arrangement import Arrangement
from .config import architecture, architecture_of
from .keys import key, layer_count
from .names import layer_of
from .tensors import handle

_NEXTN = "nextn."
_NORM = "nextn.shared_head_norm.weight"
_PARTS = {f"nextn.{name}.weight": f"{name}.weight" for name in ("enorm", "hnorm", "eh_proj")}


def as_model(container: GgufContainer) -> GgufContainer | None:
    """The file as one of a model that has that layer alone; None if the file has no such layer. `nextn.embed_tokens`
    and `nextn.shared_head_head` are copies of the model's own, and left out."""
    arch, first = architecture_of(container), layer_count(container)
    block, count = f"blk.{first}.", key(container, "block_count")
    if first == count or not all(block + part in container.tensors for part in _PARTS):
        return None
    tensors: dict[str, GgufTensor] = {}
    for name, entry in container.tensors.items():
        own = name.removeprefix(block)
        if own == _NORM:
            renamed = "output_norm.weight"
        elif name != own:
            renamed = "" if own.startswith(_NEXTN) else f"blk.0.{own}"
        else:
            renamed = name if layer_of(name) < 0 and name not in tensors else ""
        if renamed:
            tensors[renamed] = replace(entry, name=renamed)
    said = {f"{arch}.block_count": 1, f"{arch}.nextn_predict_layers": 0}
    return replace(container, metadata=container.metadata | said, tensors=tensors)


def parts_of_layer(container: GgufContainer, config: Any) -> dict[str, Weight]:
    """The two norms before the layer and the projection of their concatenated results, by `LayerAhead`'s names."""
    arrangement = Arrangement(architecture_of(container), architecture(container), container.tensors, config)
    block = f"blk.{layer_count(container)}."
    return {ours: arrangement.undone(handle(container.tensors[block + n]), block + n) for n, ours in _PARTS.items()}

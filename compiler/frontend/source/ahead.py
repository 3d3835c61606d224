"""Finds the layer for multi-token prediction in a source: a layer after the model's last one that guesses the token
after the next. Checkpoints name its weights in several ways."""

from __future__ import annotations

import re
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from ...errors import UsageError
from ...weights.handles import Weight
from .conversion import model_weights
from .model import build_meta_model, computed_buffers

if TYPE_CHECKING:
    from .source import ModelSource

LAYER, NORM = "layer.", "norm."
PARTS = ("enorm.", "hnorm.", "eh_proj.")

# Names of the weights beside those of the decoder layer: the part after the layer's prefix in checkpoints -> our name.
# "" leaves a weight out: it is a copy of the model's own embedding or LM head.
_BEHIND_THE_LAST = {
    "enorm.": "enorm.",
    "hnorm.": "hnorm.",
    "eh_proj.": "eh_proj.",
    "shared_head.norm.": NORM,
    "shared_head.head.": "",
    "embed_tokens.": "",
}
_OF_ITS_OWN = {
    "pre_fc_norm_embedding.": "enorm.",
    "pre_fc_norm_hidden.": "hnorm.",
    "fc.": "eh_proj.",
    "norm.": NORM,
    "layers.0.": LAYER,
}
_FURTHER = re.compile(r"layers\.\d+\.")  # further prediction layers, which are not read


@dataclass(frozen=True)
class LayerAhead:
    """model: a model of that layer alone, on meta, with the model's embedding and LM head. weights: those of `model`,
    by qualified name. parts: "enorm.weight" and "hnorm.weight" [H], "eh_proj.weight" [H, 2 H], and any unknown
    weights."""

    model: Any
    weights: dict[str, Weight]
    parts: dict[str, Weight]


def find_layer(tensors: Mapping[str, Weight], num_layers: int) -> dict[str, Weight] | None:
    """The weights of the first such layer of a checkpoint, by the names of this module: "enorm.", "hnorm.", "eh_proj.",
    "norm." and, for the decoder layer, "layer."; unknown weights keep their own names. None if there is no such
    layer."""
    behind = re.compile(rf"(?:.*\.)?layers\.{num_layers}\.")
    found: dict[str, Weight] = {}
    for name, tensor in tensors.items():
        if match := behind.match(name):
            own, table = name[match.end() :], _BEHIND_THE_LAST
        elif name.startswith("mtp."):
            own, table = name.removeprefix("mtp."), _OF_ITS_OWN
        else:
            continue
        begins = next((begin for begin in table if own.startswith(begin)), None)
        if begins is None and table is _OF_ITS_OWN:
            renamed = "" if _FURTHER.match(own) else own
        elif begins is None:
            renamed = LAYER + own
        else:
            renamed = table[begins] and table[begins] + own.removeprefix(begins)
        if renamed:
            found[renamed] = tensor
    return found if all(any(name.startswith(part) for name in found) for part in PARTS) else None


def norm_name(model: Any) -> str:
    """The name of the decoder's last norm. UsageError if not exactly one name fits."""
    names = [name for name, _ in model.get_decoder().named_children() if "norm" in name]
    if len(names) != 1:
        raise UsageError("--spec mtp: the model's last norm cannot be identified")
    return names[0]


def one_layer(config: Any) -> Any:
    """The configuration of a model whose only layer is built like the checkpoint's extra one: with attention over all
    tokens, and with experts if the model has any."""
    text = deepcopy(config.get_text_config())
    kinds = {
        "layer_types": getattr(text, "mtp_layer_types", None) or ["full_attention"],
        "mlp_layer_types": getattr(text, "mtp_mlp_layer_types", None) or ["sparse"],
    }
    changes = {name: list(kinds[name][:1]) for name in kinds if getattr(text, name, None) is not None}
    dense = {"first_k_dense_replace": 0, "mlp_only_layers": [], "decoder_sparse_step": 1}
    changes |= {name: value for name, value in dense.items() if getattr(text, name, None) is not None}
    for name, value in {**changes, "num_hidden_layers": 1}.items():
        setattr(text, name, value)
    return text


def layer_of_checkpoint(source: ModelSource) -> LayerAhead | None:
    """The layer of a checkpoint whose tensors have transformers' names; None if it has no such layer."""
    found = find_layer(source.tensors, source.config.get_text_config().num_hidden_layers)
    if found is None:
        return None
    whole: Any = source.build(False, "generate")
    theirs = source.weights(whole)
    model: Any = build_meta_model(one_layer(source.config))
    decoder = model.get_decoder()
    tensors: dict[str, Weight] = {}
    for part in ("get_input_embeddings", "get_output_embeddings"):
        own, other = (f"{_path(m, getattr(m, part)())}.weight" for m in (model, whole))
        tensors[own] = theirs[other]
    places = {LAYER: f"{_path(model, decoder.layers[0])}.", NORM: f"{_path(model, decoder)}.{norm_name(model)}."}
    for begin, place in places.items():
        tensors |= {place + n.removeprefix(begin): w for n, w in found.items() if n.startswith(begin)}
    parts = {name: weight for name, weight in found.items() if not name.startswith((LAYER, NORM))}
    return LayerAhead(model, model_weights(model, tensors, computed_buffers(model)), parts)


def _path(model: nn.Module, part: nn.Module) -> str:
    """The qualified name of a module of a model."""
    return next(name for name, module in model.named_modules() if module is part)

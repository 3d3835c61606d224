"""The layer that a checkpoint brings for guessing the token after the next one (multi-token prediction, DeepSeek-V3,
section 2.2): a decoder layer like the model's own over [embedding of a token, hidden state before it].

    x = eh_proj([enorm(embedding of token t+1), hnorm(hidden state of token t)])
    logits of token t+2 = lm_head(norm(layer(x)))

It is traced as a model of one layer, by the model's own code, with x in place of the embeddings.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from ...runtime.format.batch import BatchArray
from ...runtime.format.speculation import DRAFT_HIDDEN
from ..errors import UsageError
from ..graph.graph import Graph
from ..weights.handles import Weight
from .export.rope import settle_rope
from .export.trace import export
from .load import convert
from .source.conversion import model_weights
from .source.facts import model_info
from .source.model import build_meta_model, computed_buffers
from .source.source import ModelSource

LAYER, NORM = "layer.", "norm."
_PARTS = ("enorm.", "hnorm.", "eh_proj.")

# How checkpoints name what there is besides the decoder layer's own weights: the part of a name behind the layer's
# prefix -> ours. "" leaves a weight out: it is the model's own embedding or LM head once more.
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


def find_layer(tensors: Mapping[str, Weight], num_layers: int) -> dict[str, Weight] | None:
    """The weights of the first such layer of a checkpoint, by the names that this module has for them: "enorm.",
    "hnorm.", "eh_proj.", "norm." and, of the decoder layer, "layer.". None where there is none."""
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
            continue  # a layer behind the first
        renamed = LAYER + own if begins is None else table[begins] and table[begins] + own.removeprefix(begins)
        if renamed:
            found[renamed] = tensor
    return found if all(any(name.startswith(part) for name in found) for part in _PARTS) else None


class NextToken(nn.Module):
    """The layer as a model: (input_ids[1, T], draft_hidden[1, T, H]) -> logits[1, T, vocab], both on meta."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        config = model.config.get_text_config()
        self.model, self.config, hidden = model, config, config.hidden_size
        norm = model.get_decoder().get_submodule(norm_name(model))
        self.enorm, self.hnorm = deepcopy(norm), deepcopy(norm)
        self.eh_proj = nn.Linear(2 * hidden, hidden, bias=False, device="meta")
        self.hidden_first = bool(getattr(config, "mtp_hidden_states_first", False))

    def forward(
        self, input_ids: Tensor, draft_hidden: Tensor, use_cache: bool = False, return_dict: bool = True
    ) -> Any:
        """What the model of one layer gives for these tokens and the hidden states before them."""
        parts = [self.enorm(self.model.get_input_embeddings()(input_ids)), self.hnorm(draft_hidden)]
        x = self.eh_proj(torch.cat(parts[::-1] if self.hidden_first else parts, dim=-1))
        return self.model(inputs_embeds=x, use_cache=use_cache, return_dict=return_dict)


def norm_name(model: Any) -> str:
    """What the decoder calls its last norm."""
    names = [name for name, _ in model.get_decoder().named_children() if "norm" in name]
    if len(names) != 1:
        raise UsageError("--spec mtp: the model's last norm does not show")
    return names[0]


def one_layer(config: Any) -> Any:
    """The configuration of a model whose only layer is built as the checkpoint's extra one is: with attention over all
    tokens, and experts where the model has any."""
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


def load_mtp(source: ModelSource, max_seq_len: int) -> Graph:
    """The layer of a checkpoint as a graph: (token_ids, positions, DRAFT_HIDDEN[T, H]) -> logits[T, vocab], for
    sequences of so many tokens. UsageError where the checkpoint has none."""
    found = find_layer(source.tensors, source.config.get_text_config().num_hidden_layers)
    if found is None:
        raise UsageError("--spec mtp: the checkpoint has no layer that predicts the token after the next one")
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
    inner = model_weights(model, tensors, computed_buffers(model))
    weights = {f"model.{name}": weight for name, weight in inner.items()}
    weights |= {name: weight for name, weight in found.items() if name.startswith(_PARTS)}
    settle_rope(model, inner, max_seq_len)
    declared = (BatchArray(DRAFT_HIDDEN, ("T", model.config.hidden_size), "f32"),)
    module = NextToken(model).eval()
    traced = export(module, max_seq_len, None, declared)
    graph = convert(traced, weights, model_info(model, model.config, inner), max_seq_len, declared=declared)
    graph.max_seq_len = max_seq_len
    return graph


def _path(model: nn.Module, part: nn.Module) -> str:
    """The name of a module of a model."""
    return next(name for name, module in model.named_modules() if module is part)

"""Loads a checkpoint's layer for multi-token prediction (DeepSeek-V3, section 2.2), which guesses the token after the
next one: a decoder layer like the model's own over [embedding of a token, hidden state of the token before it].

    x = eh_proj([enorm(embedding of token t+1), hnorm(hidden state of token t)])
    logits of token t+2 = lm_head(norm(layer(x)))

The model's own code is traced as a model of one layer, with x in place of the embeddings.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from ...runtime.format.batch import BatchArray
from ...runtime.format.speculation import DRAFT_HIDDEN
from ..errors import TensorError, UnsupportedModel, UsageError
from ..graph.graph import Graph
from .export.rope import settle_rope
from .export.trace import export
from .load import convert
from .source.ahead import norm_name
from .source.facts import model_info
from .source.source import ModelSource

_WHERE = "in the layer that --spec mtp reads"
_READ = "without --spec mtp the layer is left out"


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
        """The logits for these tokens and the hidden states of the tokens before them."""
        parts = [self.enorm(self.model.get_input_embeddings()(input_ids)), self.hnorm(draft_hidden)]
        x = self.eh_proj(torch.cat(parts[::-1] if self.hidden_first else parts, dim=-1))
        return self.model(inputs_embeds=x, use_cache=use_cache, return_dict=return_dict)


def load_mtp(source: ModelSource, max_seq_len: int) -> Graph:
    """The layer of a checkpoint as a graph: (token_ids, positions, DRAFT_HIDDEN[T, H]) -> logits[T, vocab], for
    sequences of up to `max_seq_len` tokens. UsageError if the checkpoint has no such layer, TensorError if one of its
    weights is missing or has a wrong shape, UnsupportedModel if it has an unknown weight."""
    try:
        found = source.layer_ahead()
    except TensorError as error:  # the layer is the first of a model of one layer
        raise TensorError(error.tensor, f"{error.problem} ({_WHERE})", error.hint) from error
    if found is None:
        raise UsageError(
            "--spec mtp: the checkpoint has no layer that predicts the token after the next one", "leave --spec mtp out"
        )
    model = found.model
    module = NextToken(model).eval()
    own = {name: value for name, value in module.state_dict().items() if not name.startswith("model.")}
    if unknown := sorted(found.parts.keys() - own.keys()):
        raise UnsupportedModel(f"tensor {unknown[0]!r} is not known, and may change what the layer guesses", _READ)
    for name, parameter in own.items():
        if name not in found.parts:
            raise TensorError(name, f"is missing from the checkpoint ({_WHERE})")
        if tuple(found.parts[name].shape) != tuple(parameter.shape):
            has, wanted = list(found.parts[name].shape), list(parameter.shape)
            raise TensorError(name, f"has shape {has}, the config says {wanted} ({_WHERE})")
    weights = {f"model.{name}": weight for name, weight in found.weights.items()} | found.parts
    settle_rope(model, found.weights, max_seq_len)
    declared = (BatchArray(DRAFT_HIDDEN, ("T", model.config.hidden_size), "f32"),)
    traced = export(module, max_seq_len, None, declared)
    facts = model_info(model, model.config, found.weights)
    graph = convert(traced, weights, facts, max_seq_len, declared=declared)
    graph.max_seq_len = max_seq_len
    return graph

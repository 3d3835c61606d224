"""Loads a DFlash drafter (Chen et al. 2026) as a graph: decoder layers over a block of tokens, only the first of which
is known.

    context of token t = hidden_norm(fc([taps behind some of the model's layers]))
    keys and values, in every layer: projections of the context of tokens before the block, and of the block's values
    logits of the token at each place of the block = lm_head(norm(layers(embeddings)))

One step runs both kinds of tokens: tokens with a hidden state are context, and only their keys and values are used;
tokens without one belong to a block. Transformers' code is traced as a causal model of Qwen3 layers; the mask of each
layer is set afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ....runtime.format.batch import BatchArray
from ....runtime.format.speculation import DRAFT_HIDDEN
from ...errors import UsageError
from ...graph.graph import Graph, attention_spec, set_attention_spec
from ...weights.handles import Weight
from ..drafter_files import EMBEDDING, HEAD, DrafterTensors, shared
from ..export.rope import settle_rope
from ..export.trace import export
from ..load import convert
from ..source.conversion import completed
from ..source.facts import model_info
from ..source.model import build_meta_model, computed_buffers
from ..source.source import ModelSource
from .config import READ, BlockConfig, read_config

NORM = "hidden_norm.weight"


@dataclass(frozen=True)
class TracedDFlash:
    """graph: (token_ids, positions, DRAFT_HIDDEN[T, H]) -> logits[T, vocab]. projection: the weight `fc`, [H, taps *
    H]."""

    config: BlockConfig
    graph: Graph
    projection: Weight


class FromContext(nn.Module):
    """Replaces the projection to keys or values: it projects the context of tokens that have one. context: `given` [1,
    T, 1] and `hidden` [1, T, H] are set while the layers run."""

    def __init__(self, linear: nn.Module, context: SimpleNamespace) -> None:
        super().__init__()
        self.linear, self.context = linear, context

    def forward(self, hidden: Tensor) -> Tensor:
        """The projection of `hidden` [1, T, H], or of the context."""
        return self.linear(torch.where(self.context.given, self.context.hidden, hidden))


class BlockLayers(nn.Module):
    """The layers as a model: (input_ids[1, T], draft_hidden[1, T, H]) -> logits[1, T, vocab], on meta."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        model: Any = build_meta_model(config.text)
        context = SimpleNamespace()
        for layer in model.get_decoder().layers:
            for name in ("k_proj", "v_proj"):
                setattr(layer.self_attn, name, FromContext(getattr(layer.self_attn, name), context))
        norm = model.get_decoder().norm
        self.hidden_norm = type(norm)(config.text.hidden_size, eps=config.text.rms_norm_eps).to("meta")
        self.model, self.config, self.context, self.scale = model.eval(), config.text, context, config.scale

    def forward(
        self, input_ids: Tensor, draft_hidden: Tensor, use_cache: bool = False, return_dict: bool = True
    ) -> Any:
        """The logits for these tokens. A row of zeros in `draft_hidden` marks a token of a block, without a hidden
        state."""
        self.context.given = (draft_hidden * draft_hidden).sum(-1, keepdim=True) > 0
        self.context.hidden = self.hidden_norm(draft_hidden)
        embedded = self.model.get_input_embeddings()(input_ids) * self.scale
        return self.model(inputs_embeds=embedded, use_cache=use_cache, return_dict=return_dict)


def load_dflash(directory: Path, source: ModelSource, model: Graph) -> TracedDFlash:
    """The drafter in a directory, for the model whose trace from `source` is `model`, with the same longest sequence.
    CheckpointError, TensorError or UnsupportedModel if a file, field or tensor is missing, unknown or of another shape
    than config.json says; UsageError if the drafter belongs to another model."""
    info = model.info
    config = read_config(directory, info.num_layers, info.vocab_size)
    text, hidden = config.text, config.text.hidden_size
    for name, theirs in (("vocab_size", info.vocab_size), ("hidden_size", info.hidden_size)):
        if getattr(text, name) != theirs:
            raise UsageError(f"--spec dflash:{directory}: {name} is {getattr(text, name)}, the model's is {theirs}")
    tensors = DrafterTensors(directory, READ, _own_name)
    projection = tensors.get("fc.weight", (hidden, hidden * len(config.taps)))
    return TracedDFlash(config, _trace(config, tensors, source, model.max_seq_len), projection)


def _trace(config: BlockConfig, tensors: DrafterTensors, source: ModelSource, max_seq_len: int) -> Graph:
    module, hidden = BlockLayers(config), config.text.hidden_size
    model: Any = module.model
    shapes = {_stored_name(name): tuple(p.shape) for name, p in model.named_parameters()}
    own = {name: tensors.find(name, shapes.pop(name)) for name in (EMBEDDING, HEAD)}
    found = tensors.checked(shapes) | {n: w or shared(n, source, hidden) for n, w in own.items()}
    norm = tensors.get(NORM, (hidden,))
    tensors.check_read()
    named = {name: found[_stored_name(name)] for name, _ in model.named_parameters()}
    inner = completed(model, named, computed_buffers(model))
    settle_rope(model, inner, max_seq_len)
    declared = (BatchArray(DRAFT_HIDDEN, ("T", hidden), "f32"),)
    traced = export(module.eval(), max_seq_len, None, declared)
    weights = {f"model.{name}": weight for name, weight in inner.items()} | {NORM: norm}
    graph = convert(traced, weights, model_info(model, model.config, inner), max_seq_len, declared=declared)
    for node, mask in zip(graph.attention_nodes, config.masks, strict=True):
        set_attention_spec(node, replace(attention_spec(node), mask=mask, cached=True))
    graph.max_seq_len = max_seq_len
    return graph


def _stored_name(parameter: str) -> str:
    """The name in files of a parameter of the traced model."""
    return parameter.removeprefix("model.").replace("_proj.linear.", "_proj.")


def _own_name(stored: str) -> str:
    """z-lab's name of a tensor; transformers' class has other names for two of them."""
    name = stored.removeprefix("model.").removeprefix("encoder.")
    return name.replace("output_norm_enc.", "hidden_norm.")

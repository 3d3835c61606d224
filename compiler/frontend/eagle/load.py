"""Loads an EAGLE-3 drafter (Li et al. 2025) as a graph: decoder layers, the first of which reads two inputs.

    hidden = fc([taps behind some of the model's layers])            the first time, else the drafter's own
    y = hidden + attention([norm(embedding of token t+1), norm(hidden of token t)])
    logits of token t+2 = lm_head(norm(layers(y + mlp(norm(y)))))

Transformers' code is traced as a causal model of these layers, with `hidden` in place of the embeddings; the first
layer's norm returns both inputs. The ops before `hidden` are not traced but built from weights, see `EagleDrafter`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ....runtime.format.batch import BatchArray
from ....runtime.format.speculation import DRAFT_HIDDEN
from ...errors import UsageError
from ...graph.graph import Graph
from ...weights.handles import Weight
from ..drafter_files import EMBEDDING, HEAD, shared
from ..export.rope import settle_rope
from ..export.trace import export
from ..load import convert
from ..source.conversion import completed
from ..source.facts import model_info
from ..source.model import build_meta_model, computed_buffers
from ..source.source import ModelSource
from .config import EagleConfig, read_config
from .weights import EagleTensors


@dataclass(frozen=True)
class EagleDrafter:
    """graph: (token_ids, positions, DRAFT_HIDDEN[T, H]) -> logits[T, config.draft_vocab].

    projection: `fc`, [H, taps * model's H]. norms: one per tap, [model's H]; joined_norm: of the concatenated taps,
    [taps * model's H]. vocabulary: see `EagleTensors.vocabulary`.
    """

    config: EagleConfig
    graph: Graph
    projection: Weight
    norms: tuple[Weight, ...]
    joined_norm: Weight | None
    vocabulary: Tensor | None


class TwoInputs(nn.Module):
    """Replaces the first layer's norm: returns the normed embedding and the normed hidden state, [1, T, 2 H].

    embedded [1, T, H] is set while the layers run. normed: the hidden state is normed already.
    """

    def __init__(self, norm: nn.Module, hidden_norm: nn.Module, normed: bool) -> None:
        super().__init__()
        self.norm, self.hidden_norm, self.normed = norm, hidden_norm, normed
        self.embedded: Tensor | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        """Both, concatenated along the last axis: hidden [1, T, H] -> [1, T, 2 H]."""
        assert self.embedded is not None
        return torch.cat([self.norm(self.embedded), hidden if self.normed else self.hidden_norm(hidden)], dim=-1)


class EagleLayers(nn.Module):
    """The layers as a model: (input_ids[1, T], draft_hidden[1, T, H]) -> logits[1, T, draft_vocab], on meta."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        model: Any = build_meta_model(config.text)
        text, first = config.text, model.get_decoder().layers[0]
        norms = first.input_layernorm, type(first.input_layernorm)(text.hidden_size, eps=text.rms_norm_eps).to("meta")
        first.input_layernorm = TwoInputs(*norms, config.norm_before_residual)
        for name in ("q_proj", "k_proj", "v_proj"):
            old = getattr(first.self_attn, name)
            wide = nn.Linear(2 * old.in_features, old.out_features, bias=old.bias is not None, device="meta")
            setattr(first.self_attn, name, wide)
        model.set_output_embeddings(nn.Linear(text.hidden_size, config.draft_vocab, bias=False, device="meta"))
        self.model, self.config, self.inputs = model.eval(), text, [first.input_layernorm]

    def forward(
        self, input_ids: Tensor, draft_hidden: Tensor, use_cache: bool = False, return_dict: bool = True
    ) -> Any:
        """The logits for these tokens and the hidden states of the tokens before them."""
        [inputs] = self.inputs
        hidden = inputs.hidden_norm(draft_hidden) if inputs.normed else draft_hidden
        inputs.embedded = self.model.get_input_embeddings()(input_ids)
        try:
            return self.model(inputs_embeds=hidden, use_cache=use_cache, return_dict=return_dict)
        finally:
            inputs.embedded = None


def load_eagle(directory: Path, source: ModelSource, model: Graph) -> EagleDrafter:
    """The drafter in a directory, for the model whose trace from `source` is `model`, with the same longest sequence.

    CheckpointError, TensorError or UnsupportedModel if a file, field or tensor is missing, unknown or of another shape
    than config.json says; UsageError if the drafter belongs to another model."""
    config, vocab = read_config(directory, model.info.num_layers), model.info.vocab_size
    for name, own, theirs in (
        ("vocab_size", config.text.vocab_size, vocab),
        ("target_hidden_size", config.target_hidden, model.info.hidden_size),
    ):
        if own != theirs:
            raise UsageError(f"--spec eagle:{directory}: {name} is {own}, the model's is {theirs}")
    tensors, hidden, width = EagleTensors(directory), config.text.hidden_size, len(config.taps) * config.target_hidden
    projection = tensors.get("fc.weight", (hidden, width))
    names = [f"fc_norm.{i}.weight" for i in range(len(config.taps))] if config.fc_norm else []
    norms = tensors.checked(dict.fromkeys(names, (config.target_hidden,)))
    joined_norm = tensors.get("input_norm.weight", (width,)) if config.norm_before_fc else None
    vocabulary = tensors.vocabulary(config.draft_vocab, vocab)
    graph = _trace(config, tensors, source, vocabulary, model.max_seq_len)
    return EagleDrafter(config, graph, projection, tuple(norms.values()), joined_norm, vocabulary)


def _trace(
    config: EagleConfig, tensors: EagleTensors, source: ModelSource, vocabulary: Tensor | None, max_seq_len: int
) -> Graph:
    module, hidden = EagleLayers(config), config.text.hidden_size
    model: Any = module.model
    shapes = {_stored_name(name): tuple(p.shape) for name, p in model.named_parameters()}
    own = {name: tensors.find(name, shapes.pop(name)) for name in (EMBEDDING, HEAD)}
    found = tensors.checked(shapes) | {n: w or shared(n, source, hidden, vocabulary) for n, w in own.items()}
    tensors.check_read()
    named = {name: found[_stored_name(name)] for name, _ in model.named_parameters()}
    inner = completed(model, named, computed_buffers(model))
    settle_rope(model, inner, max_seq_len)
    declared = (BatchArray(DRAFT_HIDDEN, ("T", hidden), "f32"),)
    traced = export(module.eval(), max_seq_len, None, declared)
    info = model_info(model, model.config, inner)
    graph = convert(traced, {f"model.{name}": w for name, w in inner.items()}, info, max_seq_len, declared=declared)
    graph.max_seq_len = max_seq_len
    return graph


def _stored_name(parameter: str) -> str:
    """The name in files of a parameter of the traced model."""
    name = parameter.removeprefix("model.")
    return name.replace("input_layernorm.norm.", "input_layernorm.").replace(
        "input_layernorm.hidden_norm", "hidden_norm"
    )

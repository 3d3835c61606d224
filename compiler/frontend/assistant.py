"""An assistant that reads its model's keys and values (Gemma 4's, as transformers has it): decoder layers without own
keys and values.

    x = pre_projection([embedding of token t+1, hidden state of token t])
    y = norm(layers(x)), in which queries see the keys of the model's tokens up to t, from position t+1
    logits of token t+2 = lm_head(y)

Later guesses see the same keys from the same position, with post_projection(y) as the hidden state.

The layers are traced with transformers' code and placeholders for keys and values. The model's own take their place
when the graph is inserted, see `DraftLayer.reads`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from ...runtime.format.batch import BatchArray
from ...runtime.format.speculation import DRAFT_HIDDEN
from ..errors import CheckpointError, TensorError, UnsupportedModel, UsageError
from ..graph.graph import Graph
from ..weights.handles import Weight
from .drafter_files import HARMLESS, check_numbers, refuse_unknown
from .export.rope import settle_rope
from .export.trace import export
from .load import convert
from .source.checkpoint import open_checkpoint
from .source.conversion import model_weights
from .source.facts import model_info
from .source.identify import CONFIG, read_object
from .source.model import build_meta_model, computed_buffers, load_config
from .source.source import ModelSource

KINDS = ("gemma4_assistant", "gemma4_unified_assistant")
_READ, _TEXT = "icc reads assistants as transformers writes them", "text_config"


@dataclass(frozen=True)
class Assistant:
    """graph: (token_ids, positions, DRAFT_HIDDEN[T, model's H]) -> logits[T, vocab].

    post_projection [model's H, H]. reads: for each attention layer in `graph`, by number, the number of the model's
    layer whose keys and values it reads. If the vocabulary has clusters: centroids [C, H], whose `kept` largest
    products select the clusters of tokens to score, and cluster_of, int64 [vocab].
    """

    graph: Graph
    post_projection: Weight
    reads: dict[int, int]
    centroids: Weight | None = None
    cluster_of: Tensor | None = None
    kept: int = 0


class AssistantLayers(nn.Module):
    """The layers as a model: (input_ids[1, T], draft_hidden[1, T, model's H]) -> logits[1, T, vocab], on meta."""

    def __init__(self, model: Any, embedding: nn.Module) -> None:
        """embedding: the model's own."""
        super().__init__()
        self.model, self.embedding, self.config = model, embedding, model.config.get_text_config()

    def forward(
        self, input_ids: Tensor, draft_hidden: Tensor, use_cache: bool = False, return_dict: bool = True
    ) -> Any:
        """The logits for these tokens and the hidden states of the tokens before them."""
        x = self.model.pre_projection(torch.cat([self.embedding(input_ids), draft_hidden], dim=-1))
        result = self.model.model(
            inputs_embeds=x,
            position_ids=torch.arange(x.shape[1], device=x.device)[None] + 1,
            shared_kv_states=self._stand_ins(x),
            logits_to_keep=None,
            use_cache=use_cache,
            return_dict=return_dict,
        )
        return SimpleNamespace(logits=self.model.lm_head(result.last_hidden_state))

    def _stand_ins(self, x: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Placeholders with the shapes of the keys and values that each kind of layer reads."""
        found: dict[str, tuple[Tensor, Tensor]] = {}
        for layer in self.model.model.layers:
            heads, width = heads_of(layer.self_attn)
            rows = torch.cat([x] * -(-heads * width // x.shape[-1]), dim=-1)[..., : heads * width]
            stand_in = rows.view(1, x.shape[1], heads, width).transpose(1, 2)
            found[layer.self_attn.layer_type] = stand_in, stand_in
        return found


def heads_of(attention: Any) -> tuple[int, int]:
    """The number of KV heads of an attention module, and their width."""
    return attention.config.num_attention_heads // attention.num_key_value_groups, attention.head_dim


@contextlib.contextmanager
def all_layers_may_share(kind: Any) -> Iterator[None]:
    """A context in which a configuration of class `kind` may have no layer with own keys and values; transformers 5.23
    refuses to build a model from it otherwise."""
    modes = vars(kind).get("kv_sharing_modes")
    if not isinstance(modes, property):  # earlier versions do not check this
        yield
        return

    def shared(config: Any) -> Any:
        every = config.num_kv_shared_layers == config.num_hidden_layers
        return ["reuse"] * config.num_hidden_layers if every else modes.__get__(config)

    with mock.patch.object(kind, "kv_sharing_modes", property(shared)):
        yield


def load_assistant(directory: Path, source: ModelSource, model: Graph) -> Assistant:
    """The assistant in a directory, for the model whose trace from `source` is `model`, with the same longest sequence.
    CheckpointError, TensorError or UnsupportedModel if a file, field or tensor is missing, unknown or of another shape
    than config.json says; UsageError if the assistant belongs to another model."""
    config = _read_config(directory)
    text = config.get_text_config()
    for name, own, theirs in (
        ("vocab_size", text.vocab_size, model.info.vocab_size),
        ("backbone_hidden_size", config.backbone_hidden_size, model.info.hidden_size),
    ):
        if own != theirs:
            raise UsageError(f"--spec assistant:{directory}: {name} is {own}, the model's is {theirs}")
    reads = _reads(directory, text, source.config.get_text_config())
    whole: Any = source.build(False, "generate")
    with all_layers_may_share(type(text)):
        assistant: Any = build_meta_model(config)
    tensors = open_checkpoint(directory)
    inner = model_weights(assistant, tensors, computed_buffers(assistant))
    if unknown := sorted(name for name in tensors if name not in inner):
        raise UnsupportedModel(f"{directory}: tensor {unknown[0]!r} is not known, and may change the drafter", _READ)
    check_numbers(tensors.values())
    embedding = whole.get_input_embeddings()
    weights = {f"model.{name}": weight for name, weight in inner.items()} | _embedding(whole, source, embedding)
    settle_rope(assistant, inner, model.max_seq_len + 1)
    declared = (BatchArray(DRAFT_HIDDEN, ("T", config.backbone_hidden_size), "f32"),)
    traced = export(AssistantLayers(assistant, embedding).eval(), model.max_seq_len, None, declared)
    info = model_info(assistant, config, inner)
    graph = convert(traced, weights, info, model.max_seq_len, declared=declared)
    graph.max_seq_len = model.max_seq_len
    post_projection = inner["post_projection.weight"]
    if not config.use_ordered_embeddings:
        return Assistant(graph, post_projection, reads)
    centroids, kept = inner["masked_embedding.centroids.weight"], config.centroid_intermediate_top_k
    return Assistant(graph, post_projection, reads, centroids, _cluster_of(config, inner), kept)


def _cluster_of(config: Any, inner: Mapping[str, Weight]) -> Tensor:
    """The cluster of each token, int64 [vocab]."""
    name, vocab = "masked_embedding.token_ordering", config.get_text_config().vocab_size
    ordering = inner[name].load().to(torch.int64)
    if not torch.equal(ordering.sort().values, torch.arange(vocab)):
        raise TensorError(name, f"does not name each of {vocab} tokens once")
    of = torch.empty(vocab, dtype=torch.int64)
    of[ordering] = torch.arange(vocab) // (vocab // config.num_centroids)
    return of


def _embedding(whole: nn.Module, source: ModelSource, embedding: nn.Module) -> dict[str, Weight]:
    """The weights of the model's own embedding, by the names that they have in `AssistantLayers`."""
    path = next(path for path, module in whole.named_modules() if module is embedding)
    theirs: Mapping[str, Weight] = source.weights(whole)
    begins = f"{path}."
    return {f"embedding.{n.removeprefix(begins)}": w for n, w in theirs.items() if n.startswith(begins)}


def _reads(directory: Path, text: Any, theirs: Any) -> dict[int, int]:
    """For each layer, the number of the model's layer that it reads: the last of the same kind with its own keys and
    values."""
    kinds = getattr(theirs, "layer_types", None) or []
    own = kinds[: len(kinds) - (getattr(theirs, "num_kv_shared_layers", 0) or 0)]
    last = {kind: number for number, kind in enumerate(own)}
    if missing := sorted({*text.layer_types} - last.keys()):
        raise UsageError(f"--spec assistant:{directory}: it reads a layer of {missing[0]}, the model has none")
    return {number: last[kind] for number, kind in enumerate(text.layer_types)}


def _read_config(directory: Path) -> Any:
    """transformers' configuration of an assistant. CheckpointError if the directory has none, UnsupportedModel for an
    unknown field."""
    path = directory / CONFIG
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist", "give the directory of an assistant")
    found = read_object(path)
    if found.get("model_type") not in KINDS:
        hint = f"icc reads those of model_type {' and '.join(KINDS)}"
        raise CheckpointError(f"{path}: field 'model_type' is {found.get('model_type')!r}: not an assistant", hint)
    config = load_config(directory)
    text = config.get_text_config()
    for inside, fields, like in (
        ("", found, type(config)(text_config=text)),
        (f"{_TEXT}.", found.get(_TEXT) or {}, type(text)()),
    ):
        refuse_unknown(path, fields, {*like.to_dict(), "model_type"} | HARMLESS, _READ, inside)
    clusters, kept = config.num_centroids, config.centroid_intermediate_top_k
    if config.use_ordered_embeddings and not (
        0 < kept <= clusters <= text.vocab_size and not text.vocab_size % clusters
    ):
        fields = f"'centroid_intermediate_top_k' is {kept} and 'num_centroids' is {clusters}"
        raise CheckpointError(f"{path}: {fields}, of {text.vocab_size} tokens: that makes no sense")
    return config

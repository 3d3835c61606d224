"""Checkpoint directory -> Graph: the frontend as one function."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import SequenceLengthError, UnsupportedModel
from ..graph.graph import HIDDEN, LOGITS, Graph, ModelInfo
from ..weights.handles import Weight
from .convert import aten_handlers, index_handlers, reduce_handlers, scores  # noqa: F401  (they register themselves)
from .convert.token_major import Lowering
from .export.interfaces import MaskUsed
from .export.rope import settle_rope
from .export.trace import export
from .layers.kinds import LayerKinds
from .layers.replay import lowered_with_repeats
from .source.checkpoint import open_checkpoint
from .source.conversion import model_weights
from .source.model import build_meta_model, computed_buffers, load_config

DEFAULT_MAX_SEQ_LEN = 4096
_POSITION_LIMITS = (
    "max_position_embeddings",
    "n_positions",
    "max_target_positions",
    "max_seq_len",
    "max_sequence_length",
    "n_ctx",
)


def load_graph(
    model_dir: Path, max_seq_len: int | None = None, every_layer: bool = False, *, embeds: bool = False
) -> Graph:
    """Read, build and trace a checkpoint; nothing but headers and small constants is in memory afterwards.

    The graph is the same with `every_layer`, which traces each layer instead of one of each kind. With `embeds` it ends
    with the hidden states behind the last norm, and the checkpoint needs no LM head.
    """
    config = load_config(model_dir)
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedModel(
            f"{model_dir} is already quantized ({_quant_method(config)})", "give the unquantized checkpoint"
        )
    tensors = open_checkpoint(model_dir)

    def attempt(written_out: bool) -> Graph:
        model = build_meta_model(config, written_out, embeds)
        weights = model_weights(model, tensors, computed_buffers(model))
        return trace_model(model, config, weights, max_seq_len, every_layer, embeds)

    try:
        return attempt(written_out=False)
    except MaskUsed as error:
        try:
            return attempt(written_out=True)
        except UnsupportedModel:
            raise error from None


def trace_model(
    model: nn.Module,
    config: Any,
    weights: dict[str, Weight],
    max_seq_len: int | None = None,
    every_layer: bool = False,
    embeds: bool = False,
) -> Graph:
    """Trace a model on meta and bring it into the IR; see `load_graph`."""
    text = config.get_text_config()
    limit = position_limit(text)
    if max_seq_len is not None and limit is not None and max_seq_len > limit:
        raise SequenceLengthError(
            f"--max-seq-len {max_seq_len} is above the {limit} positions of the model",
            f"give at most {limit}",
        )
    length = max_seq_len or min(DEFAULT_MAX_SEQ_LEN, limit or DEFAULT_MAX_SEQ_LEN)
    parameters = {id(p): p.numel() for p in model.parameters()}
    floats = [w.dtype for w in weights.values() if w.dtype.is_floating_point and len(w.shape) > 1]
    info = ModelInfo(
        architecture=type(model).__name__,
        vocab_size=int(text.vocab_size),
        hidden_size=int(getattr(text, "hidden_size", 0) or 0),
        num_layers=int(getattr(text, "num_hidden_layers", 0) or 0),
        num_parameters=sum(parameters.values()),
        max_position_embeddings=limit,
        dtype=max(set(floats), key=floats.count) if floats else torch.float32,
    )
    settle_rope(model, weights, length)
    graph = None
    if not every_layer:
        with contextlib.suppress(UnsupportedModel):  # the trace of every layer then works, or gives the reason
            kinds = LayerKinds(model, weights)
            graph = lowered_with_repeats(Lowering(export(model, length, kinds), weights, info, length, kinds))
    if graph is None:
        graph = Lowering(export(model, length), weights, info, length).run()
    graph.max_seq_len = length
    if embeds:
        graph.rename_output(LOGITS, HIDDEN)
    return graph


def position_limit(config: Any) -> int | None:
    """How many positions the model has, by any of the names that configurations use; None if it does not say."""
    for name in _POSITION_LIMITS:
        found = getattr(config, name, None)
        if isinstance(found, int) and found > 0:
            return found
    return None


def _quant_method(config: Any) -> str:
    found = config.quantization_config
    method = found.get("quant_method") if isinstance(found, dict) else getattr(found, "quant_method", None)
    return str(method or "unknown method")

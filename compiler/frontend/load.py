"""Checkpoint -> Graph: the frontend as one function, source -> model on meta -> export -> token-major graph."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from ..errors import UnsupportedModel
from ..graph.graph import HIDDEN, LOGITS, Graph, ModelInfo
from ..weights.handles import Weight
from .convert import aten_handlers, index_handlers, reduce_handlers
from .convert.conversion import Conversion
from .convert.scores import WrittenOutAttention
from .convert.table import joined
from .export.rope import settle_rope
from .export.trace import Traced, export
from .layers.kinds import LayerKinds
from .layers.replay import Replay
from .mask_spec import MaskUsed
from .source.facts import completed_info, model_info
from .source.lengths import sequence_length
from .source.source import Source, open_source

HANDLERS = joined(aten_handlers.HANDLERS, index_handlers.HANDLERS, reduce_handlers.HANDLERS)


def load_graph(
    model: Path | Source, max_seq_len: int | None = None, every_layer: bool = False, *, embeds: bool = False
) -> Graph:
    """Read, build and trace a model; nothing but headers and small constants is in memory afterwards.

    The graph is the same with `every_layer`, which traces each layer instead of one of each kind. With `embeds` it ends
    with the hidden states behind the last norm, and the checkpoint needs no LM head.
    """
    source = open_source(model) if isinstance(model, Path) else model

    def attempt(written_out: bool) -> Graph:
        model = source.build(written_out, embeds)
        weights = source.weights(model)
        graph = trace_model(model, source.config, weights, max_seq_len, every_layer or not source.layered)
        graph.info = completed_info(graph)
        if embeds:
            graph.rename_output(LOGITS, HIDDEN)
        return graph

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
) -> Graph:
    """Trace a model on meta and bring it into the IR; see `load_graph`."""
    length = sequence_length(config.get_text_config(), max_seq_len)
    info = model_info(model, config, weights)
    settle_rope(model, weights, length)
    graph = None
    if not every_layer:
        with contextlib.suppress(UnsupportedModel):  # the trace of every layer then works, or gives the reason
            graph = convert(export(model, length, LayerKinds(model, weights)), weights, info, length)
    if graph is None:
        graph = convert(export(model, length), weights, info, length)
    graph.max_seq_len = length
    return graph


def convert(traced: Traced, weights: Mapping[str, Weight], info: ModelInfo, max_tokens: int) -> Graph:
    """The token-major graph of an exported model. NotRepeatable where a layer may not stand for those like it."""
    replay = Replay(traced.repeats)
    renames = [repeat.renames for repeat in traced.repeats]
    followers = (WrittenOutAttention(), replay)
    graph = Conversion(traced.program, weights, info, max_tokens, HANDLERS, followers, renames).run()
    replay.check()
    return graph

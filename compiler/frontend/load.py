"""The frontend as one function: checkpoint -> model on meta -> exported program -> token-major graph."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from ...runtime.format.batch import BatchArray
from ..errors import UnsupportedModel
from ..eviction import Eviction
from ..graph.graph import HIDDEN, LOGITS, Graph, ModelInfo
from ..handlers import joined
from ..weights.handles import Weight
from .convert import (
    axis_handlers,
    elementwise_handlers,
    index_handlers,
    reduce_handlers,
    shift_handlers,
    state_handlers,
)
from .convert.attending import InterfaceAttention
from .convert.conversion import Conversion
from .convert.index_scores import PickingIndex
from .convert.picked import PickedTokens
from .convert.rotations import ComplexRotation
from .convert.row_bias import BiasByRows
from .convert.written_out import WrittenOutAttention
from .ending import Ending, append_ending
from .export.rope import settle_rope
from .export.trace import SHORTEST, Traced, export
from .layers.kinds import LayerKinds
from .layers.replay import Replay
from .mask_spec import MaskUsed
from .source.facts import completed_info, model_info, pair_inputs, unused_positions
from .source.lengths import sequence_length
from .source.scoring import read_words
from .source.source import ModelSource, open_source
from .words import score_words

_TABLES = (elementwise_handlers, axis_handlers, index_handlers, reduce_handlers, shift_handlers, state_handlers)
HANDLERS = joined(*(file.HANDLERS for file in _TABLES))


def load_graph(
    model: Path | ModelSource,
    max_seq_len: int | None = None,
    every_layer: bool = False,
    *,
    meant: int = 0,
    task: str = "generate",
    ending: Ending | None = None,
    policy: Eviction | None = None,
) -> Graph:
    """Read, build and trace a model. Afterwards only headers and small constants are in memory.

    The graph is the same with `every_layer`, which traces each layer instead of one of each kind. For the task "embed"
    its output is the hidden states after the last norm, and the checkpoint needs no LM head; for "rerank" it is scores.
    ending: layers after the hidden states; None: none. policy: which tokens of long texts the cache keeps; None: all.
    max_seq_len: in tokens; None: a default, see `sequence_length`, which also reads `meant`.
    """
    source = open_source(model, task) if isinstance(model, Path) else model
    words = read_words(source.files) if task == "rerank" and source.files.is_dir() else None
    scores = task == "rerank" and words is None

    def attempt(written_out: bool) -> Graph:
        model = source.build(written_out, "generate" if words else task)
        weights = source.weights(model)
        every = every_layer or not source.layered
        graph = trace_model(model, source.config, weights, max_seq_len, every, scores, policy, meant)
        graph.info = completed_info(graph, predicts=task == "generate" or words is not None)
        if words:
            score_words(graph, words)
        if task != "generate":
            graph.rename_output(LOGITS, HIDDEN)
            append_ending(graph, ending or Ending())
        elif graph.looks_ahead:
            raise UnsupportedModel(
                "attention is bidirectional: the model is an encoder, not a causal decoder, and generates no text",
                "--task embed for embeddings, --task rerank for scores",
            )
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
    scores: bool = False,
    policy: Eviction | None = None,
    meant: int = 0,
) -> Graph:
    """Trace a model on meta and convert it to a graph; see `load_graph`. scores: its output is one row per text."""
    endless = policy is not None and policy.endless
    length = sequence_length(config.get_text_config(), max_seq_len, unused_positions(model), endless, meant)
    info = model_info(model, config, weights)
    settle_rope(model, weights, min(length, policy.tokens) if policy is not None and endless else length)
    declared = pair_inputs(model, config) if scores else ()
    graph = None
    if not every_layer:
        with contextlib.suppress(UnsupportedModel):  # then the trace of every layer succeeds, or raises the reason
            traced = export(model, length, LayerKinds(model, weights), declared)
            graph = convert(traced, weights, info, length, scores, declared)
    if graph is None:
        traced = export(model, length, None, declared)
        graph = convert(traced, weights, info, length, scores, declared)
    if graph.looks_ahead and traced.shortest > SHORTEST:
        raise UnsupportedModel(f"the model's code may treat texts of fewer than {traced.shortest} tokens differently")
    graph.max_seq_len = length
    return graph


def convert(
    traced: Traced,
    weights: Mapping[str, Weight],
    info: ModelInfo,
    max_tokens: int,
    picks: bool = False,
    declared: Sequence[BatchArray] = (),
) -> Graph:
    """The token-major graph of an exported model.

    picks: whether the model may pick one token of a sequence at its end. declared: inputs after token ids and
    positions, as exported. NotRepeatable if a traced layer cannot stand for the others of its kind; UnsupportedModel
    for an op that cannot be token-major.
    """
    replay = Replay(traced.repeats)
    renames = [repeat.renames for repeat in traced.repeats]
    attention = BiasByRows(), PickingIndex(), InterfaceAttention(), WrittenOutAttention()
    followers = (ComplexRotation(), *attention, *([PickedTokens()] if picks else []), replay)
    graph = Conversion(traced.program, weights, info, max_tokens, HANDLERS, followers, renames, declared).run()
    replay.check()
    return graph

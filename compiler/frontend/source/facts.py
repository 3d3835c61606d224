"""Derives the graph's ModelInfo from a configuration and its weights."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from ....runtime.format.batch import BatchArray
from ...graph.graph import Graph, ModelInfo
from ...graph.tensor_types import type_of
from ...ops import OPS, traits_of
from ...weights.handles import Weight, is_quantized
from .lengths import position_limit

TYPES = "token_type_ids"  # transformers' name


def model_info(model: nn.Module, config: Any, weights: Mapping[str, Weight]) -> ModelInfo:
    """The facts of a model on meta, from its configuration.

    dtype: that of most of the checkpoint's matrices; quantized matrices count as bfloat16.
    """
    text = config.get_text_config()
    parameters = {id(p): p.numel() for p in model.parameters()}
    matrices = [w for w in weights.values() if w.dtype.is_floating_point and len(w.shape) > 1]
    floats = [torch.bfloat16 if is_quantized(w) else w.dtype for w in matrices]
    return ModelInfo(
        architecture=type(model).__name__,
        vocab_size=int(getattr(text, "vocab_size", 0) or 0),
        hidden_size=int(getattr(text, "hidden_size", 0) or 0),
        num_layers=int(getattr(text, "num_hidden_layers", 0) or 0),
        num_parameters=sum(parameters.values()),
        max_position_embeddings=position_limit(text),
        dtype=max(set(floats), key=floats.count) if floats else torch.float32,
        padding=_padding(model, text),
    )


def _padding(model: nn.Module, text: Any) -> int | None:
    """The id of the padding token, from the embedding module, which may differ from the configuration (MPNet), or else
    from the configuration; None if neither has one."""
    with contextlib.suppress(NotImplementedError, AttributeError):
        own = getattr(model.get_input_embeddings(), "padding_idx", None)  # type: ignore[operator]
        if isinstance(own, int):
            return own
    return padding if isinstance(padding := getattr(text, "pad_token_id", None), int) else None


def completed_info(graph: Graph, predicts: bool = True) -> ModelInfo:
    """The facts of a graph's model. Facts that the configuration lacks are taken from the graph.

    predicts: whether the graph's output is logits over tokens.
    """
    info = graph.info
    rows, *_, hidden = next((type_of(node.args[1]).shape for node in token_lookups(graph)), (0, 0))  # type: ignore[arg-type]
    return replace(
        info,
        vocab_size=info.vocab_size or (type_of(graph.output).shape[-1] if predicts else rows),
        hidden_size=info.hidden_size or hidden,
        num_layers=info.num_layers or sum(traits_of(n.target).attention for n in graph.nodes),
    )


def token_lookups(graph: Graph) -> list[fx.Node]:
    """The calls that look up rows of embedding tables by token ids."""
    embedding, tokens = OPS["embedding"].overload, graph.input("token_ids")
    return [node for node in graph.nodes if node.target is embedding and _viewed(node.args[0]) is tokens]


def _viewed(node: Any) -> Any:
    """The node that a node is a view of, through any number of views."""
    while isinstance(node, fx.Node) and node.target is torch.ops.aten.view.default:
        node = node.args[0]
    return node


def unused_positions(model: nn.Module) -> int:
    """The number of leading positions that no token has: some models count positions from after the padding token's
    id."""
    for path, module in model.named_modules():
        if (
            isinstance(module, nn.Embedding)
            and "position" in path.rsplit(".", 1)[-1]
            and module.padding_idx is not None
        ):
            return module.padding_idx + 1
    return 0


def pair_inputs(model: nn.Module, config: Any) -> tuple[BatchArray, ...]:
    """The further inputs of a model for pairs of texts: token type ids if it has several types, else ()."""
    takes = TYPES in inspect.signature(model.forward).parameters
    count = int(getattr(config.get_text_config(), "type_vocab_size", 0) or 0)
    return (BatchArray(TYPES, ("T",)),) if takes and count > 1 else ()

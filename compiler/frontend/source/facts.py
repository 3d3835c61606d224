"""What a configuration and its weights say of a model: the graph's ModelInfo."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ...graph.graph import Graph, ModelInfo, type_of
from ...ops import OPS, traits_of
from ...weights.handles import QuantizedWeight, Weight
from .lengths import position_limit


def model_info(model: nn.Module, config: Any, weights: Mapping[str, Weight]) -> ModelInfo:
    """The facts of a model on meta; its dtype is what most of the checkpoint's matrices have, bfloat16 for those that
    come quantized."""
    text = config.get_text_config()
    parameters = {id(p): p.numel() for p in model.parameters()}
    matrices = [w for w in weights.values() if w.dtype.is_floating_point and len(w.shape) > 1]
    floats = [torch.bfloat16 if isinstance(w, QuantizedWeight) else w.dtype for w in matrices]
    return ModelInfo(
        architecture=type(model).__name__,
        vocab_size=int(text.vocab_size),
        hidden_size=int(getattr(text, "hidden_size", 0) or 0),
        num_layers=int(getattr(text, "num_hidden_layers", 0) or 0),
        num_parameters=sum(parameters.values()),
        max_position_embeddings=position_limit(text),
        dtype=max(set(floats), key=floats.count) if floats else torch.float32,
    )


def completed_info(graph: Graph) -> ModelInfo:
    """The facts of a model, those that no configuration tells as the graph shows them."""
    embedding, info = OPS["embedding"].overload, graph.info
    tables = [n.args[1] for n in graph.nodes if n.target is embedding and n.args[0] is graph.input("token_ids")]
    hidden = next((type_of(table).shape[-1] for table in tables), 0)  # type: ignore[arg-type]
    return replace(
        info,
        vocab_size=info.vocab_size or type_of(graph.output).shape[-1],
        hidden_size=info.hidden_size or hidden,
        num_layers=info.num_layers or sum(traits_of(n.target).attention for n in graph.nodes),
    )

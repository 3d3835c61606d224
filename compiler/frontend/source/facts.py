"""What a configuration and its weights say of a model: the graph's ModelInfo, and for how many tokens it can be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ...errors import SequenceLengthError
from ...graph.graph import ModelInfo
from ...weights.handles import QuantizedWeight, Weight

DEFAULT_MAX_SEQ_LEN = 4096
_POSITION_LIMITS = (
    "max_position_embeddings",
    "n_positions",
    "max_target_positions",
    "max_seq_len",
    "max_sequence_length",
    "n_ctx",
)


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


def sequence_length(config: Any, wanted: int | None) -> int:
    """Tokens of the longest sequence: `wanted`, or what the model and a default allow; SequenceLengthError."""
    limit = position_limit(config.get_text_config())
    if wanted is not None and limit is not None and wanted > limit:
        raise SequenceLengthError(
            f"--max-seq-len {wanted} is above the {limit} positions of the model",
            f"give at most {limit}",
        )
    return wanted or min(DEFAULT_MAX_SEQ_LEN, limit or DEFAULT_MAX_SEQ_LEN)


def position_limit(config: Any) -> int | None:
    """How many positions the model has, by any of the names that configurations use; None if it does not say."""
    for name in _POSITION_LIMITS:
        found = getattr(config, name, None)
        if isinstance(found, int) and found > 0:
            return found
    return None

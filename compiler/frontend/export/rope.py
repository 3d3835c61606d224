"""Fixes rotary frequencies that a model would choose by the length of each sequence, for the engine's longest sequence.

transformers computes "dynamic" and "longrope" frequencies again in the forward pass, by the largest position. An engine
has one set of tables, so the choice is made for `max_seq_len`, as other compilers and servers do.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from ...weights.handles import Constant, Weight


def settle_rope(model: nn.Module, weights: dict[str, Weight], max_seq_len: int) -> None:
    """Fix the frequencies of every rotary module of `model` for sequences of `max_seq_len` tokens, in `weights` and in
    the code that is traced."""
    for path, module in model.named_modules():
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, str):
            if _depends_on_length(kind):
                _settle(module, weights, path, kind, None, max_seq_len)
                module.rope_type = "default"  # type: ignore[assignment]  # the forward pass then changes nothing
                _tell_longest(module, max_seq_len)
        elif isinstance(kind, dict):
            for layer_type, layer_kind in list(kind.items()):
                if isinstance(layer_kind, str) and _depends_on_length(layer_kind):
                    _settle(module, weights, path, layer_kind, layer_type, max_seq_len)
                    kind[layer_type] = "default"


def _depends_on_length(kind: str) -> bool:
    return "dynamic" in kind or kind == "longrope"


def _settle(
    module: Any, weights: dict[str, Weight], path: str, kind: str, layer_type: str | None, max_seq_len: int
) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    options = {"layer_type": layer_type} if layer_type is not None else {}
    with torch.device("cpu"):
        frequencies, _ = ROPE_INIT_FUNCTIONS[kind](module.config, torch.device("cpu"), seq_len=max_seq_len, **options)
    name = f"{layer_type}_inv_freq" if layer_type is not None else "inv_freq"
    weights[f"{path}.{name}"] = Constant(frequencies)


def _tell_longest(module: nn.Module, max_seq_len: int) -> None:
    """Make a module's forward use `max_seq_len` where it would read the largest position (PhiMoE's scale)."""
    forward, largest = module.forward, torch.max

    def longest(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return largest(x, *args, **kwargs) if args or kwargs or x.is_floating_point() else max_seq_len - 1

    def told(*args: Any, **kwargs: Any) -> Any:
        with mock.patch.object(torch, "max", longest):
            return forward(*args, **kwargs)

    module.forward = told  # type: ignore[method-assign]

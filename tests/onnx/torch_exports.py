"""transformers' models exported to ONNX by torch, with and without a KV cache, with optimum's names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


class _Forward(nn.Module):
    def __init__(self, model: Any, cached: bool) -> None:
        super().__init__()
        self.model, self.cached = model, cached

    def forward(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, *past: Tensor) -> Any:
        given = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids}
        if not self.cached:
            return self.model(**given, use_cache=False).logits
        from transformers import DynamicCache

        cache = DynamicCache()
        for layer in range(len(past) // 2):
            cache.update(past[2 * layer], past[2 * layer + 1], layer)
        found = self.model(**given, past_key_values=cache, use_cache=True)
        return found.logits, *(value for layer in cache.layers for value in (layer.keys, layer.values))


def export(model: Any, path: Path, cached: bool = False, dynamo: bool = False) -> None:
    """Write `model` to `path`; dynamo: through torch.export, else through TorchScript."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    tokens, past = 6, 4 if cached else 0
    ids = torch.ones(2, tokens, dtype=torch.int64)
    args = [ids, torch.ones(2, tokens + past, dtype=torch.int64), torch.arange(past, past + tokens).repeat(2, 1)]
    names, results = ["input_ids", "attention_mask", "position_ids"], ["logits"]
    axes = {name: {0: "batch_size", 1: "sequence_length"} for name in [*names, *results]}
    axes["attention_mask"] = {0: "batch_size", 1: "total_sequence_length"}
    for layer in range(config.num_hidden_layers if cached else 0):
        for kind in ("key", "value"):
            args.append(torch.randn(2, heads, past, dim))
            names.append(f"past_key_values.{layer}.{kind}")
            results.append(f"present.{layer}.{kind}")
            axes[names[-1]] = {0: "batch_size", 2: "past_sequence_length"}
            axes[results[-1]] = {0: "batch_size", 2: "total_sequence_length"}
    options: dict[str, Any] = {"dynamic_axes": axes, "opset_version": 17}
    if dynamo:
        free = {0: torch.export.Dim("batch"), 1: torch.export.Dim("sequence")}
        options = {"dynamic_shapes": (free, free, free), "opset_version": 18, "verbose": False}
    torch.onnx.export(
        _Forward(model, cached), tuple(args), str(path), input_names=names, output_names=results, dynamo=dynamo,
        **options,
    )  # fmt: skip


class _Encoder(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        types = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        found = self.model(input_ids=input_ids, attention_mask=attention_mask, **types)
        return found.logits if hasattr(found, "logits") else found.last_hidden_state


def export_encoder(model: Any, path: Path, types: bool, dynamo: bool = False) -> None:
    """Write an encoder that gives hidden states, or a classifier; types: with the input token_type_ids."""
    ids = torch.full((2, 6), 3)
    args = (ids, torch.ones_like(ids), *([torch.zeros_like(ids)] if types else []))
    scores = "Classification" in type(model).__name__
    names, results = ["input_ids", "attention_mask", "token_type_ids"][: len(args)], ["last_hidden_state"]
    axes = {name: {0: "batch_size", 1: "sequence_length"} for name in [*names, *results]}
    if scores:
        results, axes["logits"] = ["logits"], {0: "batch_size"}
    options: dict[str, Any] = {"dynamic_axes": axes, "opset_version": 17}
    if dynamo:
        free = {0: torch.export.Dim("batch"), 1: torch.export.Dim("sequence")}
        options = {"dynamic_shapes": (free,) * len(args), "opset_version": 18, "verbose": False}
    torch.onnx.export(
        _Encoder(model), args, str(path), input_names=names, output_names=results, dynamo=dynamo, **options
    )

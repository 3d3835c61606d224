"""Tiny checkpoints with a layer that predicts the token after the next one, as published checkpoints name it."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_models import save_tiny

# name of a weight behind the layer's prefix, by ours: as DeepSeek V3 and GLM write it, and as Qwen3-Next and Qwen3.5 do
BEHIND = {"norm": "shared_head.norm.weight", "enorm": "enorm.weight", "hnorm": "hnorm.weight", "eh": "eh_proj.weight"}
OF_ITS_OWN = {
    "norm": "norm.weight",
    "enorm": "pre_fc_norm_embedding.weight",
    "hnorm": "pre_fc_norm_hidden.weight",
    "eh": "fc.weight",
}


def single(config: Any) -> Any:
    """The configuration of a model of one layer that is built as the extra one is."""
    text = deepcopy(config)
    for name, value in {
        "layer_types": ["full_attention"],
        "mlp_layer_types": ["sparse"],
        "first_k_dense_replace": 0,
    }.items():
        if getattr(text, name, None) is not None:
            setattr(text, name, value)
    text.num_hidden_layers = 1
    return text


def save_with_mtp(config: Any, path: Path, own: bool = False) -> tuple[Any, Any]:
    """Write a random checkpoint with such a layer, `own` under `mtp.`, else behind the last layer. Returns
    transformers' model of the checkpoint, and a model of one layer that is the extra one, with its norm.

    Layers add little to the embeddings, and the extra one passes these on: then more of its guesses are right."""
    oracle, layer = save_tiny(config, path), save_tiny(single(config), path.with_name(path.name + ".mtp"), seed=1)
    for model, folder in ((oracle, path), (layer, path.with_name(path.name + ".mtp"))):
        for name, parameter in model.named_parameters():
            if "o_proj" in name or "out_proj" in name or "down_proj" in name:
                parameter.data *= 0.1
        model.save_pretrained(folder)
    stored = load_file(path.with_name(path.name + ".mtp") / "model.safetensors")
    prefix, names = ("mtp.", OF_ITS_OWN) if own else (f"model.layers.{config.num_hidden_layers}.", BEHIND)
    blocks = prefix + "layers.0." if own else prefix
    hidden = config.hidden_size
    source = torch.Generator().manual_seed(2)
    added = {n.replace("model.layers.0.", blocks): w for n, w in stored.items() if n.startswith("model.layers.0.")}
    added[prefix + names["norm"]] = stored["model.norm.weight"]
    shift = float(stored["model.norm.weight"].mean() > 0.5)  # norms that multiply by 1 + weight lie around 0
    for part in ("enorm", "hnorm"):
        added[prefix + names[part]] = shift + 0.1 * torch.randn(hidden, generator=source)
    noise = torch.randn(hidden, 2 * hidden, generator=source)
    added[prefix + names["eh"]] = torch.eye(hidden, 2 * hidden) + 0.05 * noise
    tensors = load_file(path / "model.safetensors") | {n: w.contiguous().clone() for n, w in added.items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return oracle, layer

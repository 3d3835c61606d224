"""Adapters as peft writes them, over tiny checkpoints, with A and B that are not zero."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch


def save_adapter(
    model: Path, folder: Path, seed: int = 0, size: float = 0.05, vocabulary: int = 0, **config: Any
) -> Path:
    """A random adapter of a checkpoint, in a directory. vocabulary: what that was resized to first, 0 for not."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if vocabulary:
            torch.manual_seed(seed)
            base.resize_token_embeddings(vocabulary, mean_resizing=False)
        found = get_peft_model(base, LoraConfig(**config))
        random = torch.Generator().manual_seed(seed)
        for name, value in found.named_parameters():
            if "lora_" in name and "magnitude" not in name:
                value.data.copy_(torch.randn(value.shape, generator=random) * size)
            elif value.requires_grad:
                value.data += torch.randn(value.shape, generator=random) * size
        found.save_pretrained(folder)
    return folder


def adapted_logits(model: Path, adapter: Path, ids: list[int], vocabulary: int = 0) -> torch.Tensor:
    """What transformers and peft compute with an adapter, float32 [len(ids), vocabulary]."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if vocabulary:
            base.resize_token_embeddings(vocabulary, mean_resizing=False)
        return PeftModel.from_pretrained(base, adapter).eval()(input_ids=torch.tensor([ids])).logits[0]


def difference(expected: torch.Tensor, found: torch.Tensor) -> float:
    """The largest difference, relative to the largest that is expected."""
    return float((found - expected).abs().max() / expected.abs().max())

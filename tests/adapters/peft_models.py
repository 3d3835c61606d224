"""Adapters as peft writes them, over tiny checkpoints, with A and B that are not zero."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from icc.compiler.frontend.load import load_graph
from icc.compiler.weights.handles import QuantizedWeight
from icc.passes import pipelines
from icc.passes.base import PassContext
from icc.passes.manager import run_passes


def save_adapter(
    model: Path, folder: Path, seed: int = 0, size: float = 0.05, vocabulary: int = 0, **config: Any
) -> Path:
    """Save a random adapter of a checkpoint to a directory. vocabulary: the size to which the model's vocabulary is
    resized first, 0: not resized."""
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
    """The logits of transformers and peft with an adapter, float32 [len(ids), vocabulary]."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if vocabulary:
            base.resize_token_embeddings(vocabulary, mean_resizing=False)
        return PeftModel.from_pretrained(base, adapter).eval()(input_ids=torch.tensor([ids])).logits[0]


def difference(expected: torch.Tensor, found: torch.Tensor) -> float:
    """The largest absolute difference, as a share of the largest expected value."""
    return float((found - expected).abs().max() / expected.abs().max())


def save_dequantized(model: Path, folder: Path, quant: str) -> Path:
    """Save a checkpoint whose weights, except the head, are rounded as a quantization without calibration rounds
    them."""
    from transformers import AutoModelForCausalLM
    from transformers.pytorch_utils import Conv1D

    graph = load_graph(model)
    for phase in (pipelines.canonicalize(), pipelines.quantize(quant, "none", (), ())):
        run_passes(graph, phase, PassContext())
    found = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    values = {name.split("#")[0]: w.load() for name, w in graph.weights.items() if isinstance(w, QuantizedWeight)}
    for name, module in found.named_modules():
        if (value := values.get(f"{name}.weight")) is not None:
            module.weight.data.copy_(value.T if isinstance(module, Conv1D) else value)
    assert len(values) > 6
    found.save_pretrained(folder)
    return folder

"""A compile warns of tensors that nothing reads, except those that could not change the model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from icc.compiler.frontend.source.source import open_source
from icc.compiler.frontend.source.unplaced import in_words, worth_telling
from icc.compiler.weights.handles import Constant
from safetensors.torch import load_file, save_file
from tiny_models import save_tiny, tiny_configs
from torch import nn


def unread(path: Path, added: dict[str, torch.Tensor], task: str = "generate") -> list[str]:
    """The unread tensors that are reported for a checkpoint with these tensors added."""
    stored = path / "model.safetensors"
    save_file(
        load_file(stored) | {name: value.clone() for name, value in added.items()}, stored, metadata={"format": "pt"}
    )
    source = open_source(path, task)
    source.weights(source.build(False, task))
    return list(source.unread)


def test_names_that_the_model_has_no_place_for_are_told(tmp_path: Path) -> None:
    save_tiny(tiny_configs()["llama"], tmp_path)
    one = torch.zeros(4)
    odd = {"model.layers.0.self_attn.gate.weight": one, "model.layers.7.mlp.up_proj.weight": one, "vision.w": one}
    harmless = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": one for i in range(2)}
    found = unread(tmp_path, odd | harmless)
    assert sorted(found) == sorted(odd)
    assert in_words(found[:1]) == (
        f"1 tensor of the checkpoint is not read, because the model's code has no place for such a name: {found[0]!r}"
    )
    line = in_words([*found, "x" * 500])
    assert line.startswith("4 tensors of the checkpoint are not read") and line.endswith(", ..")
    assert "\n" not in in_words(["a\nb"]) and len(in_words(["x" * 500])) < 200


@pytest.mark.parametrize("name", ["gpt2", "qwen2-tied_yarn"])
def test_what_transformers_passes_over_is_not_told(name: str, tmp_path: Path) -> None:
    """GPT-2's masks, which older versions stored; a tied head that is stored nevertheless."""
    save_tiny(tiny_configs()[name], tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    masks = {"transformer.h.0.attn.bias": torch.ones(1, 1, 4, 4), "transformer.h.0.attn.masked_bias": torch.zeros(())}
    head = {"lm_head.weight": stored["model.embed_tokens.weight"]} if name != "gpt2" else masks
    assert unread(tmp_path, head) == []


def test_heads_of_other_tasks_are_not_told(tmp_path: Path) -> None:
    save_tiny(tiny_configs()["llama"], tmp_path)
    assert unread(tmp_path, {"cls.predictions.bias": torch.zeros(4)}, "embed") == []
    assert unread(tmp_path, {"model.layers.0.extra": torch.zeros(4)}, "embed") == ["model.layers.0.extra"]


@pytest.mark.parametrize("sees", [True, False])
def test_towers_beside_the_model_of_text_are_not_told(sees: bool) -> None:
    """For instance Llama 4, for which transformers has a text-only class."""
    places = {"vision_model.patch.weight": "vision_model.patch.weight", "language_model.model.odd": "model.odd"}
    tensors = dict.fromkeys(["language_model.lm_head.weight", *places], Constant(torch.zeros(1)))
    found = worth_telling(nn.Module(), places, tensors, 1, "generate", sees)
    assert found == [*places][1 if sees else 0 :]


def test_scales_of_activations_are_not_told(tmp_path: Path) -> None:
    """Quantizers store them, but activations and caches of an engine have their own scales. Models that are not
    quantized have none."""
    scales = [f"model.layers.0.self_attn.{name}" for name in ("k_scale", "q_proj.input_scale", "v_proj.output_scale")]
    added = dict.fromkeys([*scales, "model.layers.0.self_attn.odd"], torch.ones(1))
    save_tiny(tiny_configs()["llama"], tmp_path)
    assert sorted(unread(tmp_path, added)) == sorted(added)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": {"quant_method": "fp8"}}))
    assert unread(tmp_path, added) == ["model.layers.0.self_attn.odd"]

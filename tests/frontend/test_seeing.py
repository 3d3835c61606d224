"""Models with image or audio input: their decoder is compiled, for text only."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from icc.compiler.errors import TensorError, UnsupportedModel
from icc.compiler.frontend.load import load_graph
from icc.compiler.frontend.source.refuse import check_config
from icc.compiler.graph.interpret import interpret
from safetensors.torch import load_file, save_file

IDS = torch.arange(3, 24)


def llava(t: Any, text: dict[str, Any]) -> Any:
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    vision |= {"model_type": "clip_vision_model", "image_size": 16, "patch_size": 16}
    config = t.LlavaConfig(text_config={**text, "model_type": "mistral"}, vision_config=vision, image_token_index=110)
    return t.LlavaForConditionalGeneration(config)


def qwen_vl(t: Any, text: dict[str, Any]) -> Any:
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
    vision = {"hidden_size": 16, "intermediate_size": 16, "depth": 1, "num_heads": 1, "out_hidden_size": 64}
    tokens = {"image_token_id": 110, "video_token_id": 111, "vision_start_token_id": 112, "vision_end_token_id": 113}
    config = t.Qwen2_5_VLConfig(text_config={**text, "rope_parameters": rope}, vision_config=vision, **tokens)
    return t.Qwen2_5_VLForConditionalGeneration(config)


def flattened(file: Path) -> None:
    """Change config.json to Qwen2.5-VL's published form: fields of the text model lie beside the tower's section."""
    config = json.loads(file.read_text())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    rope = {"rope_theta": rope["rope_theta"], "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]}}
    file.write_text(json.dumps(text | config | rope))


@pytest.mark.parametrize("make", [llava, qwen_vl])
def test_the_decoder_of_a_model_that_sees_is_compiled(make: Any, tiny: ModuleType, tmp_path: Path) -> None:
    import transformers

    torch.manual_seed(0)
    model = make(transformers, tiny.GQA).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.15)
    model.save_pretrained(tmp_path)
    if make is qwen_vl:
        flattened(tmp_path / "config.json")
    with torch.no_grad():
        expected = model(IDS[None]).logits[0]
    torch.testing.assert_close(interpret(load_graph(tmp_path, 64), IDS.tolist()), expected)


def test_a_checkpoint_without_its_tower(tiny: ModuleType, tmp_path: Path) -> None:
    """Some checkpoints store only the decoder, trained or quantized; a partial tower is a damaged checkpoint."""
    import transformers

    torch.manual_seed(0)
    model = llava(transformers, tiny.GQA).eval()
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = model(IDS[None]).logits[0]
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    decoder = {name: value for name, value in stored.items() if name.startswith("language_model.")}
    assert 0 < len(decoder) < len(stored)
    save_file(decoder, file, {"format": "pt"})
    torch.testing.assert_close(interpret(load_graph(tmp_path, 64), IDS.tolist()), expected)
    for part in ("vision_tower", "language_model.model.norm", "lm_head"):
        kept = {name: value for name, value in stored.items() if part not in name}
        extra = {name: value for name, value in stored.items() if name.endswith("class_embedding")}
        save_file(kept | (extra if part == "vision_tower" else {}), file, {"format": "pt"})
        with pytest.raises(TensorError, match=part.rpartition(".")[2]):
            load_graph(tmp_path, 64)


def test_what_only_sees_or_translates_is_refused() -> None:
    for config in ({"model_type": "clip"}, {"model_type": "t5"}, {"model_type": "llava", "is_encoder_decoder": True}):
        with pytest.raises(UnsupportedModel, match=r"is not a causal language model|is an encoder-decoder"):
            check_config(Path("model"), config)

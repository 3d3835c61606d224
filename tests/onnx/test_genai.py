"""Models described by genai_config.json of onnxruntime's builder, without config.json."""

from __future__ import annotations

import json
from pathlib import Path

from icc.compiler.engine.manifest import read_bos
from icc.compiler.frontend.source.identify import onnx_config, onnx_files
from icc.compiler.genai import genai_config, genai_generation

STATED = {
    "model": {
        "bos_token_id": 1, "eos_token_id": [2, 3], "context_length": 128, "type": "llama", "vocab_size": 160,
        "decoder": {"hidden_size": 64, "num_hidden_layers": 2, "head_size": 16},
    },
    "search": {"do_sample": True, "top_k": 50, "max_length": 128},
}  # fmt: skip


def test_it_stands_for_both_configurations(tmp_path: Path) -> None:
    (tmp_path / "genai_config.json").write_text(json.dumps(STATED))
    config = onnx_config(onnx_files(tmp_path / "model.onnx"))
    assert (config["max_position_embeddings"], config["hidden_size"], config["eos_token_id"]) == (128, 64, [2, 3])
    assert genai_generation(tmp_path) == {"do_sample": True, "top_k": 50}
    assert read_bos(tmp_path) == 1
    (tmp_path / "config.json").write_text('{"bos_token_id": 7}')
    assert read_bos(tmp_path) == 7 and onnx_config(tmp_path) == {"bos_token_id": 7}


def test_one_that_cannot_be_read_says_nothing(tmp_path: Path) -> None:
    assert genai_config(tmp_path) == {}
    for text in ("{", "[]", '{"model": 3}', '{"model": {"decoder": []}}'):
        (tmp_path / "genai_config.json").write_text(text)
        assert genai_config(tmp_path) == {} and genai_generation(tmp_path) == {}

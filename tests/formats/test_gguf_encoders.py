"""GGUF files of encoders: WordPiece as llama.cpp writes it, pooling, and the tasks that they are compiled for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from icc.compiler.errors import UnsupportedModel
from icc.compiler.frontend.source.gguf.config import read_config
from icc.compiler.frontend.source.gguf.tokenizer import write_files
from icc.compiler.frontend.source.pooling import read_pooling
from icc.compiler.frontend.source.refuse import check_config
from icc.runtime.format.gguf import GgufContainer, GgufTensor
from tokenizers import Tokenizer

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "\u2581un", "aff", "able", "\u2581,", "\u2581##"]
BERT: dict[str, Any] = {
    "general.architecture": "bert", "bert.block_count": 1, "bert.embedding_length": 64, "bert.context_length": 32,
    "bert.attention.head_count": 4, "bert.feed_forward_length": 96, "bert.attention.layer_norm_epsilon": 1e-12,
    "bert.attention.causal": False, "bert.pooling_type": 2, "tokenizer.ggml.model": "bert",
    "tokenizer.ggml.tokens": PIECES, "tokenizer.ggml.token_type": np.array([3] * 5 + [1] * 5),
    **{f"tokenizer.ggml.{name}_token_id": number
       for number, name in enumerate(("padding", "unknown", "cls", "seperator", "mask"))},
}  # fmt: skip


def container(**changes: Any) -> GgufContainer:
    path = Path("a.gguf")
    shapes = {"token_embd.weight": (10, 64), "token_types.weight": (2, 64)}
    tensors = {name: GgufTensor(name, path, 0, 0, shape, "f32") for name, shape in shapes.items()}
    return GgufContainer(path, BERT | changes, tensors)


def test_wordpiece_and_pooling(tmp_path: Path) -> None:
    found = container()
    config = read_config(found)
    write_files(found, config, tmp_path)
    made = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert made.encode("Unaffable, florp").tokens == ["[CLS]", "un", "##aff", "##able", ",", "[UNK]", "[SEP]"]
    assert made.encode("un[MASK]", "un").ids == [2, 5, 4, 3, 5, 3]
    assert made.encode("un", "un").type_ids == [0, 0, 0, 1, 1]
    assert made.get_vocab_size() == len(PIECES) and made.token_to_id("##") == 9
    pooling = read_pooling(tmp_path)
    assert pooling.kinds == ("cls",) and pooling.normalize
    assert json.loads((tmp_path / "config.json").read_text())["type_vocab_size"] == 2
    with pytest.raises(UnsupportedModel, match="is a bidirectional encoder"):
        check_config(tmp_path, {"model_type": config.model_type})


def test_case_that_counts(tmp_path: Path) -> None:
    found = container(**{"tokenizer.ggml.normalizer.lowercase": False})
    write_files(found, read_config(found), tmp_path)
    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode("Un").tokens == ["[CLS]", "[UNK]", "[SEP]"]


def test_an_encoder_that_sees_no_later_tokens() -> None:
    with pytest.raises(UnsupportedModel, match=r"bert\.attention\.causal' is True"):
        read_config(container(**{"bert.attention.causal": True}))

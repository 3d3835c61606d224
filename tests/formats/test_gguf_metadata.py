"""Odd or wrong metadata of GGUF files: read as llama.cpp reads it, or refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from icc.compiler.errors import CheckpointError, IccError, UnsupportedModel
from icc.compiler.frontend.source.checkpoint import mapped
from icc.compiler.frontend.source.gguf.config import read_config
from icc.compiler.frontend.source.gguf.hybrids import delta_rows, interleaved_rows
from icc.compiler.frontend.source.gguf.tokenizer import write_files
from icc.runtime.format.gguf import GgufContainer, GgufTensor
from tokenizers import Tokenizer

LETTERS = [*"abcdefghijklmnopqrstuvwxyz", "Ġ", "th", "the", "<s>", "</s>"]
BPE: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": LETTERS, "tokenizer.ggml.merges": ["t h", "th e"],
    "tokenizer.ggml.token_type": np.array([1] * 29 + [3, 3]), "tokenizer.ggml.bos_token_id": 29,
    "tokenizer.ggml.eos_token_id": 30,
}  # fmt: skip
LLAMA: dict[str, Any] = {
    "general.architecture": "llama", "llama.block_count": 1, "llama.embedding_length": 64,
    "llama.attention.head_count": 4, "llama.feed_forward_length": 96, "llama.rope.dimension_count": 16,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}  # fmt: skip


def container(metadata: dict[str, Any], rows: int = 32) -> GgufContainer:
    path = Path("a.gguf")
    return GgufContainer(
        path, LLAMA | metadata, {"token_embd.weight": GgufTensor("token_embd.weight", path, 0, 0, (rows, 64), "f32")}
    )


def files(metadata: dict[str, Any], folder: Path, rows: int = 32) -> tuple[Tokenizer, dict[str, Any]]:
    found = container(metadata, rows)
    folder.mkdir(exist_ok=True)
    write_files(found, read_config(found), folder)
    facts = json.loads((folder / "generation_config.json").read_text())
    return Tokenizer.from_file(str(folder / "tokenizer.json")), facts


def test_no_token_that_the_file_has_not(tmp_path: Path) -> None:
    """transformers' GPT-2 tokenizer would add <|endoftext|>, for which the model has no row."""
    tokenizer, facts = files(BPE, tmp_path)
    assert tokenizer.get_vocab_size() == len(LETTERS)
    assert max(tokenizer.encode("the <|endoftext|>").ids) < len(LETTERS)
    assert tokenizer.encode("the</s>").ids == [28, 30]
    assert facts["eos_token_id"] == [30] and facts["bos_token_id"] == 29


def test_chat_templates_by_name(tmp_path: Path) -> None:
    named = {"tokenizer.chat_templates": ["tool_use", "../out", "none"], "tokenizer.chat_template.tool_use": "T"}
    files(BPE | {"tokenizer.chat_template": "D"} | named | {"tokenizer.chat_template.../out": "X"}, tmp_path / "f")
    found = {file.relative_to(tmp_path).as_posix(): file.read_text() for file in tmp_path.rglob("*.jinja")}
    assert found == {"f/chat_template.jinja": "D", "f/additional_chat_templates/tool_use.jinja": "T"}


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"general.type": "mmproj"}, "turns images or sounds into tokens"),
        ({"general.architecture": "clip"}, "turns images or sounds into tokens"),
        ({"general.type": "imatrix", "general.architecture": None}, "statistics of activations"),
        ({"general.type": "adapter"}, "it holds an adapter"),
    ],
)
def test_files_that_are_no_models(metadata: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModel, match=words):
        read_config(container(metadata))


def test_special_tokens_of_other_letters(tmp_path: Path) -> None:
    """DeepSeek's special tokens are not spelled in GPT-2's byte alphabet; the BOS must not become an additional last
    token."""
    name = "<\uff5cbegin\u2581of\u2581sentence\uff5c>"
    tokenizer, _ = files(BPE | {"tokenizer.ggml.tokens": [*LETTERS[:29], name, "</s>"]}, tmp_path)
    assert tokenizer.get_vocab_size() == len(LETTERS) and tokenizer.encode(f"{name}the").ids == [29, 28]


@pytest.mark.parametrize("number", [-1, 2**32 - 1])
def test_ids_that_stand_for_none(number: int, tmp_path: Path) -> None:
    assert "bos_token_id" not in files(BPE | {"tokenizer.ggml.bos_token_id": number}, tmp_path)[1]


WRONG_TOKENS: dict[str, tuple[dict[str, Any], str]] = {
    "no merges": ({"merges": None}, "lacks tokenizer.ggml.merges"),
    "merges of numbers": ({"merges": np.zeros(3)}, "'tokenizer.ggml.merges' is ndarray"),
    "types of text": ({"token_type": ["a"] * 31}, "'tokenizer.ggml.token_type' is list"),
    "few types": ({"token_type": np.ones(5)}, "token_type has 5 of 31 tokens"),
    "no kind": ({"model": None}, "has 31 tokens and does not say of what kind"),
    "plamo": ({"model": "plamo2"}, "a vocabulary of the kind 'plamo2'"),
    "no scores": ({"model": "llama", "merges": None}, "lacks tokenizer.ggml.scores"),
    "few scores": ({"model": "llama", "scores": np.ones(5)}, "scores has 5 of 31 tokens"),
    "flag": ({"add_bos_token": "yes"}, "'tokenizer.ggml.add_bos_token' is str"),
    "token": ({"bos_token_id": 40}, "no token 40, the bos token of 31"),
    "rwkv": ({"model": "rwkv"}, "a vocabulary of the kind 'rwkv'"),
    "rule": ({"pre": "florp"}, "by the rule 'florp'"),
}


@pytest.mark.parametrize("what", WRONG_TOKENS)
def test_a_wrong_vocabulary_is_refused(what: str, tmp_path: Path) -> None:
    changes, words = WRONG_TOKENS[what]
    metadata = BPE | {f"tokenizer.ggml.{name}": value for name, value in changes.items()}
    with pytest.raises(IccError, match=words) as caught:
        files({name: value for name, value in metadata.items() if value is not None}, tmp_path)
    assert "\n" not in str(caught.value)


def test_more_tokens_than_rows(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="31 tokens, and embeddings of 30"):
        files(BPE, tmp_path, rows=30)
    with pytest.raises(CheckpointError, match=r"'tokenizer\.chat_template' is list"):
        files(BPE | {"tokenizer.chat_template": ["a", "b"]}, tmp_path)


WRONG_SIZES: dict[str, tuple[str, Any, type[IccError], str]] = {
    "layers": ("block_count", 10**9, CheckpointError, "its metadata say 1000000000 layers, it has 1 tensors"),
    "epsilon": ("attention.layer_norm_rms_epsilon", None, CheckpointError, "layer_norm_rms_epsilon' is missing"),
    "kind": ("rope.scaling.type", "florp", UnsupportedModel, "rotary scaling of the kind 'florp'"),
    "base": ("rope.freq_base", float("nan"), CheckpointError, r"'llama\.rope\.freq_base' is nan"),
    "factor": ("rope.scaling.factor", float("inf"), CheckpointError, r"'llama\.rope\.scaling\.factor' is inf"),
}


@pytest.mark.parametrize("what", WRONG_SIZES)
def test_wrong_sizes_are_refused(what: str) -> None:
    key, value, kind, words = WRONG_SIZES[what]
    with pytest.raises(kind, match=words):
        read_config(container({f"llama.{key}": value}))


def test_scaling_as_it_was_written_once() -> None:
    found = read_config(container({"llama.rope.scale_linear": 4.0, "llama.rope.freq_base": 1e4})).rope_parameters
    assert found["rope_type"] == "linear" and found["factor"] == 4.0


def test_a_file_in_place_of_another_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a"
    for content in (b"one", b"another"):
        (tmp_path / "new").write_bytes(content)
        (tmp_path / "new").rename(path)
        assert bytes(mapped(path).tolist()) == content


class Sizes:
    linear_num_key_heads, linear_num_value_heads, linear_key_head_dim, linear_value_head_dim = 2, 4, 3, 5


def test_rows_of_delta_rules() -> None:
    """The converter's permutation of numbered rows is undone."""
    groups, each, wide, dims = 2, 2, 3, 5
    tiled = torch.arange(20).view(groups, each, dims).transpose(0, 1).reshape(-1)
    order = delta_rows(Sizes, "attn_gate.weight")
    assert order is not None and torch.equal(tiled[order], torch.arange(20))
    whole = torch.arange(2 * groups * wide + 20)
    moved = torch.cat([whole[:12], 12 + tiled])
    order = delta_rows(Sizes, "ssm_conv1d.weight")
    assert order is not None and torch.equal(moved[order], whole)
    rows = torch.arange(groups * (2 * wide + 2 * each * dims)).view(groups, -1)
    parts = torch.split(rows, [wide, wide, each * dims, each * dims], dim=1)
    assert torch.equal(torch.cat([part.reshape(-1) for part in parts])[interleaved_rows(Sizes)], rows.reshape(-1))

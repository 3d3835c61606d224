"""A missing or incomplete tokenizer.json is built from the checkpoint's other files, as transformers does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from icc.compiler.frontend.source.tokenizer_files import text_files
from tokenizers import Tokenizer

WORDS = {"<s>": 0, "</s>": 1, "a": 2, "b": 3, "ab": 4, "<turn>": 5}
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
BEGIN = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}},
}
ENDS = {"bos_token": "<s>", "eos_token": {"content": "</s>"}}


def token(content: str, **flags: bool) -> dict[str, Any]:
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    return {**plain, "content": content, **flags}


def checkpoint(folder: Path, config: dict[str, Any], processor: Any = None) -> Path:
    facts = {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "pre_tokenizer": None,
        "added_tokens": [{"id": i, **token(text, special=True)} for i, text in enumerate(("<s>", "</s>"))],
        "post_processor": processor, "decoder": None,
        "model": {"type": "BPE", "vocab": WORDS, "merges": ["a b"]},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(facts))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text("{}")
    return folder


def made(folder: Path) -> Tokenizer:
    found = text_files(folder)
    assert not found.told and found.path != folder
    assert (found.path / "config.json").read_text() == "{}"  # and any other files
    return Tokenizer.from_file(str(found.path / "tokenizer.json"))


def test_tokens_that_tokenizer_config_alone_has(tmp_path: Path) -> None:
    stated = {"0": token("<s>", special=True), "5": token("<turn>", special=True), "6": token("<call>")}
    config = {"added_tokens_decoder": {**stated, "9": token("<gap>"), "x": 3, "3": token("<taken>")}}
    found = made(checkpoint(tmp_path, config))
    assert found.encode("ab<turn>a<call>").ids == [4, 5, 2, 6]
    assert found.get_vocab_size() == 7
    assert found.decode([4, 5, 6]) == "ab <call>"  # the special token is left out


@pytest.mark.parametrize(
    ("config", "processor"),
    [
        ({}, BEGIN),
        ({"add_bos_token": True, **ENDS}, BYTE_LEVEL),  # transformers 5 does not read these two
        ({"add_bos_token": False, "add_eos_token": False, **ENDS}, BEGIN),
        ({"added_tokens_decoder": {"0": token("<s>"), "4": "ab"}}, None),
    ],
)
def test_what_says_all_stays(config: dict[str, Any], processor: Any, tmp_path: Path) -> None:
    assert text_files(checkpoint(tmp_path, config, processor)).path == tmp_path


def test_vocabularies_of_other_libraries(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    words = {**{chr(ord("a") + i): i for i in range(26)}, "Ġ": 26, "th": 27, "the": 28, "<|endoftext|>": 29}
    (tmp_path / "vocab.json").write_text(json.dumps(words))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nt h\nth e\n")
    found = text_files(tmp_path)
    tokenizer = Tokenizer.from_file(str(found.path / "tokenizer.json"))
    text = "the end<|endoftext|>of the"
    assert tokenizer.encode(text).ids == AutoTokenizer.from_pretrained(tmp_path).encode(text)
    assert (found.path / "tokenizer_config.json").resolve() == tmp_path / "tokenizer_config.json"


def test_a_vocabulary_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "tokenizer.model").write_bytes(b"\1\2\3")
    found = text_files(tmp_path)
    assert found.path == tmp_path and "tokenizer.model" in found.told and "\n" not in found.told
    (tmp_path / "tokenizer.model").unlink()
    assert text_files(tmp_path).told == ""

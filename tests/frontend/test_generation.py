"""generation_config.json: the values that an engine uses must have the type and range of a request's parameters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from icc.compiler.errors import CheckpointError
from icc.compiler.generation import read_generation, unused_settings
from icc.compiler.options import CompileOptions
from icc.compiler.request import check
from tiny_models import save_tiny, tiny_configs


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ("{", "is not valid JSON"),
        ([], "is not a JSON object"),
        ([{"temperature": 1}], "is not a JSON object"),
        ({"temperature": "0.7"}, "temperature is '0.7', not a number"),
        ({"top_k": [5]}, r"top_k is '\[5\]', not a number"),
        ({"top_p": True}, "top_p is 'True', not a number"),
        ({"do_sample": "yes"}, "do_sample is 'yes', not true or false"),
        ({"eos_token_id": "2"}, "eos_token_id is '2', not a token id"),
        ({"eos_token_id": [2, "3"]}, "eos_token_id is .*, not a token id"),
        ({"pad_token_id": 1.5}, "pad_token_id is '1.5', not a token id"),
        ({"do_sample": True, "top_k": -1}, "top_k is -1, not from 0 to"),
        ({"do_sample": True, "temperature": -1}, "temperature is -1, not from 0 to 100"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0, not from 0.01"),
    ],
)
def test_what_is_no_setting_is_refused_in_a_line(written: Any, words: str, tmp_path: Path) -> None:
    text = written if isinstance(written, str) else json.dumps(written)
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(CheckpointError, match=words) as error:
        read_generation(tmp_path)
    assert str(tmp_path / "generation_config.json") in error.value.message and "\n" not in error.value.message


def test_what_published_ones_have_is_read(tmp_path: Path) -> None:
    assert read_generation(tmp_path) == {}
    for written in (
        {},
        {"eos_token_id": [1, 2], "pad_token_id": None, "temperature": None, "transformers_version": "4.51.0"},
        {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0, "max_new_tokens": "any"},
        {"do_sample": True, "top_k": 50.0, "repetition_penalty": 1.05, "bos_token_id": 1},
        {"do_sample": False, "top_k": -1},  # unused: not sampled
    ):
        (tmp_path / "generation_config.json").write_text(json.dumps(written))
        assert read_generation(tmp_path) == written


def test_what_is_asked_for_and_not_taken_is_told(tmp_path: Path) -> None:
    nothing = {"num_beams": 1, "typical_p": 1.0, "no_repeat_ngram_size": 0, "bad_words_ids": None, "stop_strings": []}
    assert unused_settings({**nothing, "temperature": 0.5, "max_length": 20}) == []
    save_tiny(tiny_configs()["llama"], tmp_path / "model")
    asked = {**nothing, "suppress_tokens": [5], "no_repeat_ngram_size": 3}
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(asked))
    options = CompileOptions(tmp_path / "model", tmp_path / "x.engine", target="native", quant="none")
    assert any("asks for no_repeat_ngram_size, suppress_tokens" in warning for warning in check(options).warnings)


def test_a_compile_says_so_at_once(tmp_path: Path) -> None:
    save_tiny(tiny_configs()["llama"], tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text('["greedy"]')
    options = CompileOptions(tmp_path / "model", tmp_path / "x.engine", target="native", quant="none")
    with pytest.raises(CheckpointError, match=r"generation_config\.json is not a JSON object"):
        check(options)

"""Pre-tokenization of GGUF models: the rules that transformers lacks. They were compared with llama.cpp's own
vocabularies and expected tokens (its models/*.gguf.inp and .out), which are too large to keep here."""

from __future__ import annotations

from typing import Any

import pytest
from icc.compiler.errors import UnsupportedModel
from icc.compiler.frontend.source.gguf.splits import completed_splits
from tokenizers import Tokenizer, models, pre_tokenizers


def made(rule: str | None, **facts: Any) -> Any:
    """A byte-level tokenizer of single characters and "the"."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "the", "\u0120\u0120"]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    given = {"tokenizer_type": "gpt2", "pre_tokenizer_type": rule, "tokens": [*tokens[:-1], "  "]}
    return completed_splits(tokenizer, given | {"token_type": [1] * (len(tokens) - 1) + [4]} | facts)


@pytest.mark.parametrize(
    ("rule", "text", "pieces"),
    [
        ("deepseek-v3", "ab 12345", ["ab", "\u0120", "123", "45"]),
        ("deepseek-llm", "it 12345", ["it", "\u0120", "12345"]),
        ("deepseek-coder", "it 123", ["it", "\u0120", "1", "2", "3"]),
        ("falcon", "a==12345", ["a", "==", "123", "45"]),
        ("smollm", "x123", ["x", "1", "2", "3"]),
        ("glm4", "I'M 1234", ["I", "'M", "\u0120", "123", "4"]),
        ("stablelm2", "I'M 12", ["I", "'M", "\u0120", "1", "2"]),
        ("seed-coder", "a!!\nb", ["a", "!!", "\u010a", "b"]),
        ("bloom", "go on, now", ["go", "\u0120on", ",", "\u0120now"]),
        ("olmo", "x123", ["x", "123"]), (None, "x123", ["x", "123"]),
    ],
)  # fmt: skip
def test_pieces(rule: str | None, text: str, pieces: list[str]) -> None:
    assert [piece for piece, _ in made(rule).pre_tokenizer.pre_tokenize_str(text)] == pieces


def test_words_that_are_tokens_stay_whole() -> None:
    assert len(made("llama-bpe").encode("the").ids) == 1
    assert len(made("qwen2").encode("the").ids) == 3  # no merges for it


def test_runs_of_spaces_that_are_tokens() -> None:
    """The file has the spaces themselves; in GPT-2's byte alphabet, as transformers expects them, no text would
    match."""
    tokenizer = made("gpt-2")
    assert tokenizer.encode("a  b").ids == [tokenizer.token_to_id(t) for t in ("a", "  ", "b")]
    assert tokenizer.token_to_id("  ") == 257


def test_a_rule_that_nobody_knows_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="cuts text by the rule 'kimi-k2'"):
        made("kimi-k2")


@pytest.mark.parametrize(("prefix", "first"), [(True, "\u2581\u2581a"), (False, "\u2581a")])
def test_spaces_of_sentencepiece(prefix: bool, first: str) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    found = completed_splits(tokenizer, {"tokenizer_type": "llama", "add_prefix_space": prefix})
    assert found.normalizer.normalize_str(" a") == first and found.pre_tokenizer is None

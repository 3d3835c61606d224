"""The first text is encoded with a part of the vocabulary, to the same tokens as with all of it; decoding is the same,
too."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from icc.compiler.engine.vocabulary import compact, make_vocabulary
from icc.runtime.first_text import FirstText
from icc.runtime.format.vocabulary import Vocabulary
from icc.runtime.tokenizer import Tokenizer
from tokenizers import AddedToken, decoders, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Whole
from tokenizers.models import BPE, WordLevel

TEXT = [
    "the cat sat on the mat, the cats sat",
    "Grüße aus Köln 1234 5678",
    "def f(x):\n    return x\n",
    "你好 你好 été été",
]
ADDED = [
    AddedToken("<|end|>", special=True),
    AddedToken("<user>", lstrip=True),
    AddedToken("cat", single_word=True, normalized=False),
]


def trained(model: BPE, alphabet: list[str], **parts: Any) -> Whole:
    made = Whole(model)
    for name, part in parts.items():
        setattr(made, name, part)
    first = [f"<0x{byte:02X}>" for byte in range(256)] if model.byte_fallback else []
    unknown = [model.unk_token] if model.unk_token else []
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=[*unknown, *first], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(TEXT * 3, trainer)
    made.add_tokens(ADDED)
    return made


def bytes_of_gpt2(**options: Any) -> Whole:
    cut = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    return trained(
        BPE(**options),
        pre_tokenizers.ByteLevel.alphabet(),
        pre_tokenizer=cut,
        decoder=decoders.ByteLevel(),
        post_processor=processors.TemplateProcessing(single="$A <0>", special_tokens=[("<0>", 1)]),
    )


def sentencepiece() -> Whole:
    """As in Llama 2 and Gemma: no pre-tokenizer, spaces as a character, bytes for unknown characters."""
    written = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    back = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    model = BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    return trained(model, [], normalizer=written, decoder=decoders.Sequence(back))


def words() -> Whole:
    """Lower case without accents; some characters have no token."""
    written = normalizers.Sequence([normalizers.NFD(), normalizers.Lowercase(), normalizers.StripAccents()])
    return trained(BPE(unk_token="<unk>"), [], normalizer=written, pre_tokenizer=pre_tokenizers.Whitespace())


MAKE: dict[str, Callable[[], Whole]] = {
    "bytes": bytes_of_gpt2, "whole pieces": lambda: bytes_of_gpt2(ignore_merges=True), "sentencepiece": sentencepiece,
    "words": words,
}  # fmt: skip


@cache
def both(name: str) -> tuple[Whole, bytes, bytes]:
    raw = MAKE[name]().to_str(pretty=True).encode()
    tokens = compact(raw)
    made = make_vocabulary(tokens)
    assert made is not None and len(tokens) < len(raw)
    return Whole.from_buffer(raw), tokens, made


@pytest.mark.parametrize("name", MAKE)
@settings(max_examples=25, deadline=None)
@given(
    text=st.lists(st.sampled_from([*TEXT, "<|end|>", "<user>", " cat ", "catcat", "  ", "\n"]) | st.text()).map("".join)
)
def test_the_tokens_are_those_of_the_whole(name: str, text: str) -> None:
    whole, tokens, made = both(name)
    wanted = whole.encode(text).ids
    found = FirstText(Vocabulary(made)).encode(text, True)
    assert found in (None, wanted)
    assert found == wanted or len(text) > 200 or not text.isascii()  # a short ASCII text is encoded at once
    tokenizer = Tokenizer(tokens, Vocabulary(made))
    assert tokenizer.encode(text) == tokenizer.encode(text) == wanted
    for skip in (False, True):
        assert tokenizer.decode(wanted, skip) == whole.decode(wanted, skip_special_tokens=skip)


@pytest.mark.parametrize("name", MAKE)
def test_every_token_is_there(name: str) -> None:
    whole, tokens, made = both(name)
    tokenizer, alone = Tokenizer(tokens, Vocabulary(made)), Tokenizer(tokens)
    for token in range(-1, whole.get_vocab_size() + 2):
        assert tokenizer.token_bytes(token) == (alone.token_bytes(token) if token >= 0 else b"")
        assert tokenizer.decode([abs(token)]) == whole.decode([abs(token)])
    assert tokenizer.special_tokens == alone.special_tokens and tokenizer.vocab_size == alone.vocab_size


def test_others_are_read_as_a_whole() -> None:
    suffixed = json.loads(both("words")[1])
    suffixed["model"]["end_of_word_suffix"] = "</w>"
    listed = Whole(WordLevel({"a": 0, "b": 1}, unk_token="a")).to_str()
    assert [make_vocabulary(raw) for raw in (json.dumps(suffixed).encode(), listed.encode(), b"{}")] == [None] * 3

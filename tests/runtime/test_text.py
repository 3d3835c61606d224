"""Decoding of tokens to text: characters of several bytes, stop strings across tokens, special tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from icc.runtime.errors import EngineFormatError
from icc.runtime.tokenizer import Detokenizer, StopFinder, Tokenizer


@pytest.fixture
def tokenizer(byte_tokenizer_file: Path) -> Tokenizer:
    return Tokenizer(byte_tokenizer_file.read_bytes())


def pieces(tokenizer: Tokenizer, tokens: list[int], prompt: list[int] | None = None) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt or [])
    return [*(detokenizer.push(token) for token in tokens), detokenizer.flush()]


def test_a_character_comes_when_its_last_byte_does(tokenizer: Tokenizer) -> None:
    assert pieces(tokenizer, list("aé€😀b".encode())) == [
        *["a", "", "é", "", "", "€", "", "", "", "😀", "b", ""],
    ]


def test_an_unfinished_character_comes_at_the_end_as_a_replacement(tokenizer: Tokenizer) -> None:
    assert pieces(tokenizer, list("a€".encode())[:-1]) == ["a", "", "", "\ufffd"]


def test_bytes_that_never_become_a_character_are_not_held_back_for_ever(tokenizer: Tokenizer) -> None:
    shown = pieces(tokenizer, [0x80] * 100)
    assert "".join(shown) == "\ufffd" * 100
    assert any(shown[:40])


def test_special_tokens_give_no_text_and_do_not_pile_up(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer)
    assert "".join(detokenizer.push(token) for token in [257] * 200 + [97]) == "a"
    assert len(detokenizer._window) < 50


def test_texts_of_single_tokens_are_kept_for_the_last_few(byte_tokenizer_file: Path) -> None:
    """Otherwise a server that has shown every token of a large vocabulary would keep tens of megabytes."""
    content = tokenizers.Tokenizer.from_str(byte_tokenizer_file.read_text())
    content.add_tokens([f"<{number}>" for number in range(2000)])
    tokenizer = Tokenizer(content.to_str().encode())
    for token in [*range(tokenizer.vocab_size), 5]:
        assert tokenizer.decode_shown([token], True) == tokenizer.decode([token])
    assert tokenizer._decode_one.cache_info().currsize < tokenizer.vocab_size / 2


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=20), prompt=st.text(max_size=8))
def test_the_pieces_are_the_text(text: str, prompt: str) -> None:
    tokenizer = _shared_tokenizer()
    ids = tokenizer.encode(text)
    assert "".join(pieces(tokenizer, ids, tokenizer.encode(prompt))) == text


_made: list[Tokenizer] = []


def _shared_tokenizer() -> Tokenizer:
    assert _made, "the fixture below runs first"
    return _made[0]


@pytest.fixture(autouse=True)
def _remember(tokenizer: Tokenizer) -> None:
    _made[:] = [tokenizer]


def test_a_leading_space_depends_on_what_was_before() -> None:
    """A SentencePiece-like decoder strips the first space of a text; the continuation of a prompt keeps it."""
    model = tokenizers.models.WordLevel({"\u2581a": 0, "\u2581b": 1, "c": 2}, unk_token="c")
    plain = tokenizers.Tokenizer(model)
    plain.decoder = tokenizers.decoders.Metaspace()
    tokenizer = Tokenizer(plain.to_str().encode())
    assert pieces(tokenizer, [1, 2], prompt=[0]) == [" b", "c", ""]
    assert pieces(tokenizer, [1, 2]) == ["b", "c", ""]


def test_stored_truncation_and_padding_are_switched_off(byte_tokenizer_file: Path) -> None:
    raw = tokenizers.Tokenizer.from_file(str(byte_tokenizer_file))
    raw.enable_truncation(2)
    raw.enable_padding(length=8)
    raw.save(str(byte_tokenizer_file))
    assert Tokenizer(byte_tokenizer_file.read_bytes()).encode("abcd") == [97, 98, 99, 100]


@pytest.mark.parametrize("raw", [b"{}", b"", b"\xff"])
def test_a_file_that_is_no_tokenizer_is_refused(raw: bytes) -> None:
    with pytest.raises(EngineFormatError, match=r"tokenizer\.json is not a tokenizer"):
        Tokenizer(raw)


def test_a_stop_string_is_found_across_pieces_and_nothing_of_it_is_shown() -> None:
    finder = StopFinder(["END"])
    assert [finder.push(piece) for piece in ["aE", "N", "Dx"]] == [("a", False), ("", False), ("", True)]


def test_what_looked_like_a_stop_string_is_shown_once_it_is_none() -> None:
    finder = StopFinder(["END"])
    assert [finder.push(piece) for piece in ["aE", "N", "x", "E"]] == [
        ("a", False),
        ("", False),
        ("ENx", False),
        ("", False),
    ]
    assert finder.flush() == "E"


def test_the_earliest_of_several_stop_strings_ends_the_text() -> None:
    assert StopFinder(["cd", "b"]).push("abcd") == ("a", True)
    assert StopFinder([]).push("abcd") == ("abcd", False)
    finder = StopFinder(["aab"])
    assert [finder.push(piece) for piece in "aaab"] == [("", False), ("", False), ("a", False), ("", True)]


@settings(max_examples=200, deadline=None)
@given(
    parts=st.lists(st.text(alphabet="ab", max_size=3), max_size=8),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_shown_text_is_the_text_before_the_first_stop_string_to_be_complete(parts: list[str], stops: list[str]) -> None:
    finder = StopFinder(stops)
    shown, seen = "", ""
    for part in parts:
        piece, stopped = finder.push(part)
        shown, seen = shown + piece, seen + part
        starts = [index for stop in stops if (index := seen.find(stop)) >= 0]
        assert stopped == bool(starts)
        if stopped:
            assert shown == seen[: min(starts)]
            return
    assert shown + finder.flush() == seen

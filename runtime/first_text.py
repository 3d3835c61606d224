"""FirstText: encodes a short text with only the tokens that can occur in it, so that the first text need not wait for
the whole vocabulary.

A token can occur only if it is a substring of the text as normalized and pre-tokenized. The tokens that are substrings,
with the merges that make them, therefore encode the text as the whole vocabulary does.
"""

from __future__ import annotations

from collections.abc import Iterator
from threading import Lock

import tokenizers

from .format.vocabulary import Vocabulary, damaged
from .token_bytes import alphabet

_LOOKUPS = 20_000  # substrings of a text; with more, reading the whole vocabulary is faster
_UNKNOWN = "\uffff"  # not a character of any text or token


class FirstText:
    """Encoder made from a vocabulary; `frame` is its tokenizer without tokens, except added ones."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        try:
            self.frame = tokenizers.Tokenizer.from_buffer(bytes(vocabulary.facts.frame))
        except Exception as error:  # the library raises bare Exception
            raise damaged(error) from error
        self._lock = Lock()

    def encode(self, text: str, add_special_tokens: bool) -> list[int] | None:
        """Token ids of the text; None if it needs the whole vocabulary. EngineFormatError if the tokens make no valid
        tokenizer."""
        if len(text) > _LOOKUPS // 2:
            return None
        with self._lock:
            pieces = self._pieces(text)
            if pieces is None or sum(self._parts(piece) for piece in pieces) > _LOOKUPS:
                return None
            try:
                self.frame.model = self._model(pieces)
            except Exception as error:  # IndexError, KeyError, or the library's bare Exception
                raise damaged(error) from error
            return self.frame.encode(text, add_special_tokens=add_special_tokens).ids

    def _pieces(self, text: str) -> list[str] | None:
        """The pieces into which the tokenizer splits the text before it looks for tokens; None if it may replace
        characters in ways that this code cannot predict."""
        normalizer = self.frame.normalizer
        written = text if normalizer is None else normalizer.normalize_str(text)
        characters = {_UNKNOWN, "▁", *alphabet().values(), *text, *written}
        added = {token.content for token in self.frame.get_added_tokens_decoder().values()}
        tokens = {token: number for number, token in enumerate(sorted(characters | added))}
        self.frame.model = tokenizers.models.BPE(vocab=tokens, merges=[], unk_token=_UNKNOWN)
        found = self.frame.encode(text, add_special_tokens=False)
        pieces: list[str] = []
        last: int | None = None
        for token, word in zip(found.tokens, found.word_ids, strict=True):
            if token == _UNKNOWN:
                return None
            if len(token) > 1:  # an added token
                last = None
            elif word is not None and word == last:
                pieces[-1] += token
            else:
                pieces.append(token)
                last = word
        return pieces

    def _parts(self, piece: str) -> int:
        return len(piece) * min(len(piece), self._vocabulary.facts.longest)

    def _model(self, pieces: list[str]) -> tokenizers.models.BPE:
        """A model of the tokens that are substrings of the pieces, and their merges."""
        facts, find = self._vocabulary.facts, self._vocabulary.find
        parts = {part for piece in set(pieces) for part in _parts_of(piece, facts.longest)}
        ids = {part: token for part in parts if (token := find(part)) is not None}
        text = {token: part for part, token in ids.items()}
        merges = sorted(merge for token in ids.values() for merge in self._vocabulary.merges(token))
        pairs = [(text[left], text[right]) for _, left, right in merges]
        for token in facts.always:
            if (always := self._vocabulary.id_to_token(token)) is not None:
                ids[always] = token
        return tokenizers.models.BPE(vocab=ids, merges=pairs, **facts.options)


def _parts_of(piece: str, longest: int) -> Iterator[str]:
    for start in range(len(piece)):
        for end in range(start + 1, min(len(piece), start + longest) + 1):
            yield piece[start:end]

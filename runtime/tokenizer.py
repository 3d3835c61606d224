"""Tokenizer: converts text to token ids and back, also token by token. Wraps the `tokenizers` library."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import tokenizers

from .errors import EngineFormatError, RequestError
from .token_bytes import TokenBytes

if TYPE_CHECKING:
    from .format.vocabulary import Vocabulary

_CONTEXT = 6  # prompt tokens before the first decoded token, so that this gets its leading space
_ALONE = 1024  # tokens whose single texts are cached: the most frequent ones are in every text
_PATIENCE = 32  # tokens after which bytes that do not form a character are shown anyway
_MOST_SAID = 500  # characters of the library's errors, which list all possible values
_REPLACEMENT = "\ufffd"


class Tokenizer:
    """The tokenizer of an engine, from the content of tokenizer.json.

    Special tokens are added by its own post-processor; `special_tokens` are their texts and ids. vocabulary: the same
    tokens as tables, from which texts of tokens are read; the content is then parsed only when a second text, or a long
    one, is encoded. None: it is parsed at once.
    """

    def __init__(self, raw: bytes, vocabulary: Vocabulary | None = None) -> None:
        self._raw, self._vocabulary, self._first = raw, vocabulary, None
        if vocabulary is not None:
            from .first_text import FirstText

            self._first = FirstText(vocabulary)
        frame = self._tokenizer if self._first is None else _plain(self._first.frame)
        self._decode_one = lru_cache(_ALONE)(lambda token, skip: self.decode([token], skip))
        added = frame.get_added_tokens_decoder()
        self.special_tokens = {token.content: number for number, token in added.items() if token.special}
        self._decoder = decoder = frame.decoder
        described = b"null" if decoder is None else decoder.__getstate__()
        self._bytes = TokenBytes(described, {token.content for token in added.values()})

    @cached_property
    def _tokenizer(self) -> tokenizers.Tokenizer:
        """The complete tokenizer, parsed when first needed."""
        try:
            return _plain(tokenizers.Tokenizer.from_buffer(self._raw))
        except Exception as error:  # the library raises bare Exception
            said = str(error)[:_MOST_SAID]
            raise EngineFormatError(f"tokenizer.json is not a tokenizer: {said}", "compile the model again") from error

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of the text. RequestError if it contains surrogates, which are no characters."""
        try:
            first, self._first = self._first, None
            if first is not None and (ids := first.encode(text, add_special_tokens)) is not None:
                return ids
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        except (UnicodeEncodeError, TypeError) as error:
            raise RequestError("the prompt is not valid Unicode text", field="prompt") from error

    def encode_within(self, text: str, longest: int, from_start: bool = False) -> list[int]:
        """As `encode`, truncated to `longest` tokens, special ones included: the text loses its last tokens, or with
        `from_start` its first. RequestError as `encode`."""
        try:
            part = self._tokenizer.encode(text, add_special_tokens=False)
        except (UnicodeEncodeError, TypeError) as error:
            raise RequestError("the prompt is not valid Unicode text", field="prompt") from error
        room = max(longest - self._tokenizer.num_special_tokens_to_add(False), 0)
        part.truncate(room, direction="left" if from_start else "right")
        return self._tokenizer.post_process(part, None, True).ids

    def encode_between(self, around: Sequence[str], texts: tuple[str, str], longest: int | None = None) -> list[int]:
        """Token ids of two texts with three texts before, between and after them.

        longest: of more tokens, the last ones before the third text around are removed; None: keep all. RequestError as
        `encode`.
        """
        ids = self.encode(around[0] + texts[0] + around[1] + texts[1] + around[2], add_special_tokens=False)
        if longest is None or len(ids) <= longest:
            return ids
        ending = self.encode(around[2], add_special_tokens=False)[-longest:]
        return ids[: longest - len(ending)] + ending

    def encode_pair(self, first: str, second: str, longest: int | None = None) -> tuple[list[int], list[int]]:
        """Token ids of two texts, joined by the tokenizer, and for each token the type: which of the two it belongs to.

        longest: the longer text is truncated until both fit; None: keep all. RequestError as `encode`.
        """
        try:
            parts = [self._tokenizer.encode(text, add_special_tokens=False) for text in (first, second)]
        except (UnicodeEncodeError, TypeError) as error:
            raise RequestError("the text is not valid Unicode", field="documents") from error
        if longest is not None:
            lengths = [len(part.ids) for part in parts]
            room = max(longest - self._tokenizer.num_special_tokens_to_add(True), 0)
            while sum(lengths) > room:
                at = int(lengths[1] >= lengths[0])
                lengths[at] = max(min(lengths[at] - 1, lengths[1 - at]), room - lengths[1 - at])
            for part, length in zip(parts, lengths, strict=True):
                part.truncate(length)
        whole = self._tokenizer.post_process(parts[0], parts[1], True)
        return whole.ids, whole.type_ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of the token ids; bytes that are not UTF-8 become U+FFFD."""
        vocabulary = self._vocabulary
        if vocabulary is None:
            return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        texts = [text for token in token_ids if (text := vocabulary.id_to_token(token)) is not None]
        if skip_special_tokens:
            texts = [text for text in texts if text not in self.special_tokens]
        return " ".join(texts) if self._decoder is None else self._decoder.decode(texts)

    def decode_shown(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """As `decode`, with a cache for single tokens, because the same ones are decoded again and again."""
        if len(token_ids) != 1:
            return self.decode(token_ids, skip_special_tokens)
        return self._decode_one(token_ids[0], skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token; the text of a special token; b"" if there is no such token."""
        token = (self._vocabulary or self._tokenizer).id_to_token(token_id)
        return b"" if token is None else self._bytes.of(token)

    def token_id(self, token: str) -> int | None:
        """The id of a token, given its text in the vocabulary; None if there is none."""
        return self._tokenizer.token_to_id(token)

    def to_json(self) -> str:
        """The text of its tokenizer.json."""
        return self._tokenizer.to_str()

    @property
    def vocab_size(self) -> int:
        """The number of tokens, added ones included."""
        return self._tokenizer.get_vocab_size()


def _plain(tokenizer: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The tokenizer without a checkpoint's truncation and padding for training batches."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


class Detokenizer:
    """Turns one request's tokens into text, token by token.

    A token may be half a character or have a space that depends on its neighbours, so each new token is decoded
    together with a few before it, and only the added text is returned. Text that ends in U+FFFD may be an unfinished
    character: it is held back until more tokens complete it.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = (), skip_special_tokens: bool = True) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._window = list(prompt[-_CONTEXT:])  # shown tokens (up to `_shown`), then tokens held back
        self._shown = len(self._window)

    def copy(self) -> Detokenizer:
        """A copy in the same state."""
        other = copy(self)
        other._window = list(self._window)
        return other

    def push(self, token_id: int) -> str:
        """The text that this token completes; may be empty."""
        self._window.append(token_id)
        return self._piece(flush=len(self._window) - self._shown >= _PATIENCE)

    def flush(self) -> str:
        """The text of the tokens that are held back; half a character becomes U+FFFD."""
        return self._piece(flush=True)

    def _piece(self, flush: bool) -> str:
        before = self._tokenizer.decode_shown(self._window[: self._shown], self._skip)
        after = self._tokenizer.decode(self._window, self._skip)
        if after.endswith(_REPLACEMENT) and not flush:
            return ""
        if len(after) <= len(before):
            if flush:  # drop tokens without text, or the window would grow for ever
                del self._window[self._shown :]
            return ""
        del self._window[: self._shown]
        self._shown = len(self._window)
        return after[len(before) :]


class StopFinder:
    """Finds stop strings in streamed text, and holds back text that may be the beginning of one.

    include: whether the text includes the stop string; if not, it ends before it.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops, self._include = tuple(stops), include
        self._held = ""
        self.found: str | None = None  # the stop string that was found

    def push(self, piece: str) -> tuple[str, bool]:
        """Take a chunk of text. Returns text that is safe to show, and whether a stop string was found, which ends the
        text."""
        if not self._stops:
            return piece, False
        text = self._held + piece
        found = [(index, stop) for stop in self._stops if (index := text.find(stop)) >= 0]
        if found:
            self._held = ""
            index, self.found = min(found)
            return text[: index + (len(self.found) if self._include else 0)], True
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def copy(self) -> StopFinder:
        """A copy in the same state."""
        return copy(self)

    def flush(self) -> str:
        """The text that is held back, when no more text follows."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """The length of the longest ending of `text` that is a proper prefix of `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0

"""tokenizer/vocabulary.bin: the tokens and merges of a byte-pair tokenizer as tables that need no parsing.

tokenizer.json defines the tokenizer, but reading 49,000 tokens from it takes 0.1 s, and 262,000 tokens half a second,
while a first prompt needs a few dozen. This file holds the same tokens in arrays (little-endian uint32): the text of
each token by its id, a hash table from texts to ids, and the merges by the token that they make.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator, Sequence
from itertools import chain
from zlib import crc32

import msgspec

from ..errors import EngineFormatError

VOCABULARY_FILE = "vocabulary.bin"
_MAGIC = b"ICCVOC1\n"


class VocabularyFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """frame: tokenizer.json without merges and with only the added tokens. tokens: number of ids, from 0 on. slots: of
    the hash table. merges: number of merges. longest: characters of the longest token. always: ids that any text may
    need. options: arguments of a BPE model of the tokenizers library."""

    frame: msgspec.Raw
    tokens: int
    slots: int
    merges: int
    longest: int
    always: list[int]
    options: dict[str, bool | str | None]


class Vocabulary:
    """The tables, read in place from `raw`. EngineFormatError if they are damaged."""

    def __init__(self, raw: bytes) -> None:
        try:
            size = struct.unpack_from("<I", raw, len(_MAGIC))[0] if raw.startswith(_MAGIC) else len(raw)
            start = len(_MAGIC) + 4
            self.facts = facts = msgspec.json.decode(raw[start : start + size], type=VocabularyFacts)
            start += size
            counts = (facts.tokens + 1, facts.slots, facts.tokens + 1, 3 * facts.merges)
            if start % 4 or min(counts) < 0 or facts.slots <= facts.tokens or sys.byteorder != "little":
                raise ValueError("its sizes make no sense")
            tables: list[memoryview] = []
            for count in counts:
                tables.append(memoryview(raw)[start : start + 4 * count].cast("I"))  # TypeError if it is cut off
                if len(tables[-1]) != count:
                    raise ValueError("it is too short")
                start += 4 * count
        except (struct.error, msgspec.DecodeError, TypeError, ValueError) as error:
            raise damaged(error) from error
        self._ends, self._slots, self._firsts, self._merges = tables
        self._texts = raw[start:]

    def id_to_token(self, token: int) -> str | None:
        """The text of a token as in tokenizer.json; None if no token has this id."""
        if not 0 <= token < self.facts.tokens:
            return None
        text = self._text(token)
        return text.decode(errors="replace") if text else None

    def find(self, text: str) -> int | None:
        """The id of a token of the BPE model, given its text (added tokens need not be in the model); None if there is
        none."""
        key = text.encode()
        first = crc32(key) % len(self._slots)
        for at in chain(range(first, len(self._slots)), range(first)):
            if not (token := self._slots[at]):
                return None
            if self._text(token - 1) == key:
                return token - 1
        return None

    def merges(self, token: int) -> Iterator[tuple[int, int, int]]:
        """(rank, left id, right id) of every merge that makes a token."""
        for at in range(self._firsts[token], self._firsts[token + 1]):
            yield self._merges[3 * at], self._merges[3 * at + 1], self._merges[3 * at + 2]

    def _text(self, token: int) -> bytes:
        return self._texts[self._ends[token] : self._ends[token + 1]]  # any part of it, or b"", if the ends are damaged


def damaged(error: Exception) -> EngineFormatError:
    """The error for a damaged vocabulary file."""
    return EngineFormatError(f"{VOCABULARY_FILE} is damaged: {error}", "compile the model again")


def encode_vocabulary(facts: VocabularyFacts, tables: Sequence[bytes], texts: bytes) -> bytes:
    """The bytes of the file. tables: ends of the texts, slots of the hash table, first merge of each token, merges.
    texts: the texts of all tokens, joined."""
    header = msgspec.json.encode(facts)
    header += b" " * (-(len(_MAGIC) + 4 + len(header)) % 4)
    return b"".join((_MAGIC, struct.pack("<I", len(header)), header, *tables, texts))

"""TokenBytes: the bytes of each token of a vocabulary, which need not be whole characters."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from functools import lru_cache
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """Depending on the decoder of tokenizer.json, tokens are written with GPT-2's stand-ins for bytes, or as characters
    with a mark for a space and <0xNN> for other bytes. decoder: its JSON. added: tokens that are written as plain text.
    """

    def __init__(self, decoder: bytes, added: Collection[str]) -> None:
        kinds = list(_decoders(json.loads(decoder)))
        self._stand_ins = {char: byte for byte, char in alphabet().items()} if "ByteLevel" in kinds else None
        self._byte_fallback = "ByteFallback" in kinds
        self._blank = "▁" if {"Metaspace", "Replace", "ByteFallback"} & set(kinds) else None
        self._added = frozenset(added)

    def of(self, token: str) -> bytes:
        """The bytes of a token, given its text in the vocabulary."""
        if token in self._added:
            return token.encode()
        if self._stand_ins is not None:
            try:
                return bytes(self._stand_ins[char] for char in token)
            except KeyError:
                return token.encode()
        if self._byte_fallback and (byte := _BYTE.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        return (token if self._blank is None else token.replace(self._blank, " ")).encode()


def _decoders(decoder: Any) -> Iterator[str]:
    if isinstance(decoder, dict):
        yield str(decoder.get("type"))
        for part in decoder.get("decoders") or ():
            yield from _decoders(part)


@lru_cache(1)
def alphabet() -> dict[int, str]:
    """GPT-2's printable stand-in for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + at) for at, byte in enumerate(others)}

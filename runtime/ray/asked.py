"""What a router sees of a request before anything tokenizes it: its model, and digests of how its prompt begins."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from ..server.engine.router import chunk_keys

BYTES = 4  # of text that count as a token; a token's number is as long
# the fields that a prompt is of, in the order in which templates put them first
_BEFORE = ("tools", "system", "instructions", "documents")
_PROMPT = ("messages", "input", "prompt")
_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


@dataclass(frozen=True)
class AskedOfReplica:
    """model: as the request names it, "" where it names none. keys: digests of the beginnings of its prompt, as
    `prefix_keys` makes them. length: about how many tokens it has."""

    model: str = ""
    keys: tuple[bytes, ...] = ()
    length: int = 0


def read_asked(body: bytes) -> AskedOfReplica:
    """What a body asks for. One that is cut off or no JSON object is answered by a replica, which says what is wrong:
    nothing is known of it here.

    Texts are looked at as they are written, four bytes as a token, so that a conversation's next turn begins with the
    chunks of the turn before, and no tokenizer is needed; token ids have four bytes each.
    """
    try:
        fields = _decoder.decode(body)
        model = _text(fields.get("model")) or ""
        seed = "\0".join((model, _text(fields.get("lora")) or "", _text(fields.get("cache_salt")) or ""))
        content = b"".join(_content(fields))
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return AskedOfReplica()
    return AskedOfReplica(model, tuple(chunk_keys(seed.encode(), content)), len(content) // BYTES)


def _text(raw: msgspec.Raw | None) -> str | None:
    """A JSON string; None for anything else."""
    return None if raw is None or not bytes(raw).startswith(b'"') else msgspec.json.decode(raw, type=str)


def _content(fields: dict[str, msgspec.Raw]) -> Iterator[bytes]:
    for name in (*_BEFORE, *_PROMPT):
        raw = fields.get(name)
        if raw is None:
            continue
        value = msgspec.json.decode(raw)
        if isinstance(value, str):
            yield value.encode()
        elif name == "prompt" and isinstance(value, list) and all(map(_is_token, value)):
            yield array("i", value).tobytes()
        elif isinstance(value, list):  # not as a list: what follows a message would differ from its end
            for one in value:
                yield one.encode() if isinstance(one, str) else msgspec.json.encode(one, order="deterministic")
        else:
            yield msgspec.json.encode(value, order="deterministic")


def _is_token(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 31

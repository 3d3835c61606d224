"""What a router learns from a request that is not tokenized yet: its model, and digests of its prompt's prefixes."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from ..server.engine.router import chunk_keys

BYTES = 4  # bytes of text that count as one token; a token id also takes 4 bytes
# the fields that make up a prompt, in the order in which most templates render them
_BEFORE = ("tools", "system", "instructions", "documents")
_PROMPT = ("messages", "input", "prompt")
_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


@dataclass(frozen=True)
class AskedOfReplica:
    """model: as the request names it, "" if it names none. keys: digests of the prefixes of its prompt, as `chunk_keys`
    makes them. length: of the prompt, in tokens, estimated."""

    model: str = ""
    keys: tuple[bytes, ...] = ()
    length: int = 0


def read_asked(body: bytes) -> AskedOfReplica:
    """Read a request body. An incomplete body, or one that is no JSON object, gives an empty AskedOfReplica; the
    replica that gets it answers with the error.

    No tokenizer is needed: four bytes of text count as a token, and a token id has four bytes. The next turn of a
    conversation begins with the chunks of the turn before.
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
        elif isinstance(value, list):  # each message alone, so that a longer list begins alike
            for one in value:
                yield one.encode() if isinstance(one, str) else msgspec.json.encode(one, order="deterministic")
        else:
            yield msgspec.json.encode(value, order="deterministic")


def _is_token(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 31

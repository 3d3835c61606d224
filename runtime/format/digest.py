"""The seal of engine.json: its last field is a digest of the file's other bytes, so that any change is noticed."""

from __future__ import annotations

import hashlib

import msgspec

from ..errors import EngineFormatError
from .decoding import COPY_AGAIN
from .manifest import Manifest
from .present import MANIFEST_FILE

_BLANK = "0" * 64


def digest_of(raw: bytes, digest: str) -> str:
    """sha256 (hex) of the file's bytes with the digest itself blanked out."""
    return hashlib.sha256(raw.replace(digest.encode(), _BLANK.encode())).hexdigest()


def check_seal(raw: bytes, digest: str) -> None:
    """Raise EngineFormatError unless the file's bytes have this digest, which is part of the file."""
    if digest and digest_of(raw, digest) != digest:
        raise EngineFormatError(f"{MANIFEST_FILE} has changed since it was written", COPY_AGAIN)


def encode_sealed(manifest: Manifest) -> bytes:
    """The bytes of engine.json: indented JSON, keys in declaration order, files sorted, sealed with its digest."""
    return sealed(msgspec.structs.replace(manifest, files=dict(sorted(manifest.files.items()))))


def sealed(facts: msgspec.Struct) -> bytes:
    """The JSON bytes of a struct whose field `digest` seals it."""
    blank = msgspec.structs.replace(facts, digest=_BLANK)
    raw = msgspec.json.format(msgspec.json.encode(blank), indent=2) + b"\n"
    return raw.replace(_BLANK.encode(), digest_of(raw, _BLANK).encode())

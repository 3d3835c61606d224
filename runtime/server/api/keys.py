"""ApiKeys: which clients are accepted, and how they are separated in the queue and in the prefix cache."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
from collections.abc import Iterable
from pathlib import Path

from ...errors import UsageError

_MIN_CHARS = 8


class ApiKeys:
    """The accepted keys; without keys everybody is accepted, as one client.

    The secret is random at each start unless one is given, so that nobody can guess a client's name or salt.
    """

    def __init__(self, keys: Iterable[str] = (), secret: bytes | None = None) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]
        self._secret = secret or os.urandom(32)

    @classmethod
    def read(cls, file: Path, secret: bytes | None = None) -> ApiKeys:
        """Read a file of one key per line; empty lines and lines that start with # are skipped. UsageError if the file
        cannot be read, has no key, or a short one. secret: None for a random one."""
        try:
            lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{file} cannot be read: {error}") from error
        keys = [line for line in lines if line and not line.startswith("#")]
        short = next((line for line in keys if len(line) < _MIN_CHARS), None)
        if not keys or short is not None:
            what = "holds no key" if not keys else f"holds a key of fewer than {_MIN_CHARS} characters"
            raise UsageError(f"{file} {what}", "write one key per line")
        return cls(keys, secret)

    @property
    def required(self) -> bool:
        """Whether requests need a key."""
        return bool(self._digests)

    def client(self, authorization: bytes | None) -> str | None:
        """The client of an Authorization header: a name that does not reveal the key; None if the key is not
        accepted."""
        if not self._digests:
            return ""
        digest = hashlib.sha256(_key_of(authorization or b"")).digest()
        accepted = False
        for known in self._digests:  # compares all keys, so that the time reveals nothing
            accepted |= hmac.compare_digest(digest, known)
        return self._client(digest) if accepted else None

    def salt(self, client: str, cache_salt: str | None) -> bytes:
        """The 32 bytes that separate a client's KV blocks from those of others. cache_salt: of the request, None for
        none."""
        return self._keyed(
            b"salt", client.encode(), b"" if cache_salt is None else b"given", (cache_salt or "").encode()
        )

    @property
    def plain_salts(self) -> list[bytes]:
        """The salts of every client's requests without a cache_salt."""
        clients = [self._client(digest) for digest in self._digests] or [""]
        return [self.salt(client, None) for client in clients]

    def _client(self, digest: bytes) -> str:
        return self._keyed(b"client", digest)[:16].hex()

    def _keyed(self, *fields: bytes) -> bytes:
        """A keyed hash of the fields, each with its length, so that different lists of fields never hash the same
        bytes."""
        content = b"".join(len(field).to_bytes(8, "little") + field for field in fields)
        return hashlib.blake2b(content, key=self._secret, digest_size=32, person=b"icc-client").digest()


def _key_of(authorization: bytes) -> bytes:
    """The key in `Bearer KEY`, or in `Basic ...` as the password, which is what browsers send; b"" if none."""
    scheme, _, rest = authorization.strip().partition(b" ")
    if scheme.lower() == b"bearer":
        return rest.strip()
    if scheme.lower() == b"basic":
        try:
            return base64.b64decode(rest.strip(), validate=True).partition(b":")[2]
        except (binascii.Error, ValueError):
            return b""
    return b""

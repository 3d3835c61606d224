"""Keys and signatures in minisign's file formats (https://jedisct1.github.io/minisign/), so that `minisign` and icc can
read each other's files. The cryptography comes from the package `cryptography` and from hashlib."""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from hmac import compare_digest
from typing import TYPE_CHECKING

from ..errors import MissingExtraError, SignatureError, UsageError, install

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

_ALGORITHM, _HASHED = b"Ed", b"ED"  # Ed25519 of a message, and of its BLAKE2b-512
_SCRYPT, _PLAIN, _CHECKSUM = b"Sc", b"\0\0", b"B2"
_PUBLIC = struct.Struct("<2s8s32s")
_SECRET = struct.Struct("<2s2s2s32sQQ104s")
_HELD = struct.Struct("<8s64s32s")  # the secret part of a key: id, seed and public key, checksum
_SIGNATURE = struct.Struct("<2s8s64s")
_COMMENT, _TRUSTED = "untrusted comment: ", "trusted comment: "
_BLOCK = 8  # scrypt's r
_MOST_MEMORY = 1 << 30  # bytes of memory for scrypt, as in minisign


@dataclass(frozen=True)
class PublicKey:
    """An Ed25519 public key. id: 8 bytes by which signatures name it. raw: its 32 bytes."""

    id: bytes
    raw: bytes

    @classmethod
    def parse(cls, text: str) -> PublicKey:
        """Parse a key file's text, or only its base64 line. UsageError if it is no public key."""
        algorithm, name, raw = _unpack(_PUBLIC, text, "public key")
        if algorithm != _ALGORITHM:
            raise UsageError("the public key is not one of Ed25519", "make one: icc keygen, or minisign -G")
        return cls(name, raw)

    @property
    def name(self) -> str:
        """The id as minisign writes it, without leading zeros."""
        return f"{int.from_bytes(self.id, 'little'):X}"

    def text(self) -> str:
        """The text of the key file."""
        return f"{_COMMENT}minisign public key {self.name}\n{_encoded(_ALGORITHM + self.id + self.raw)}\n"

    def verify(self, signature: str, message: bytes) -> str:
        """Verify a signature file; returns its trusted comment. SignatureError if it was made by another key or for
        another message."""
        lines = [line.rstrip("\r") for line in signature.split("\n")]
        if len(lines) < 4 or not lines[0].startswith(_COMMENT) or not lines[2].startswith(_TRUSTED):
            raise SignatureError("the signature file is damaged: it has not the lines of minisign's")
        try:
            algorithm, name, own = _SIGNATURE.unpack(base64.b64decode(lines[1], validate=True))
            whole = base64.b64decode(lines[3], validate=True)
        except (struct.error, ValueError) as error:  # ValueError: not ASCII
            raise SignatureError(f"the signature file is damaged: {error}") from error
        if name != self.id:
            made = PublicKey(name, b"").name
            raise SignatureError(f"the signature is by key {made}, not by {self.name}", "give the key of who signed it")
        if algorithm not in (_ALGORITHM, _HASHED):
            raise SignatureError(f"the signature is of a kind that icc does not know: {algorithm!r}")
        signed = hashlib.blake2b(message).digest() if algorithm == _HASHED else message
        comment = lines[2].removeprefix(_TRUSTED)
        if not self._is_signed(own, signed):
            raise SignatureError("the signature is not of this file: it has changed, or another was signed")
        if not self._is_signed(whole, own + comment.encode()):
            raise SignatureError("the signature's trusted comment has changed since it was signed")
        return comment

    def _is_signed(self, signature: bytes, message: bytes) -> bool:
        try:
            _ed25519_public(self.raw).verify(signature, message)
        except _invalid_signature():
            return False
        return True


@dataclass(frozen=True, repr=False)
class SecretKey:
    """An Ed25519 secret key. public: its public key. seed: the 32 bytes from which the secret is derived."""

    public: PublicKey
    seed: bytes

    @classmethod
    def new(cls) -> SecretKey:
        """A new random key."""
        seed = os.urandom(32)
        return cls(PublicKey(os.urandom(8), _public_of(seed)), seed)

    @classmethod
    def parse(cls, text: str, password: Callable[[], bytes]) -> SecretKey:
        """Parse a key file's text. password: called if the key is encrypted. UsageError if the password is wrong, or if
        the text is no key."""
        algorithm, kdf, check, salt, operations, memory, held = _unpack(_SECRET, text, "secret key")
        if algorithm != _ALGORITHM or kdf not in (_SCRYPT, _PLAIN) or check != _CHECKSUM:
            raise UsageError("the secret key is of a kind that icc does not know", "make one: icc keygen")
        if kdf == _SCRYPT:
            stream = _scrypt(password(), salt, operations, memory)
            held = bytes(a ^ b for a, b in zip(held, stream, strict=True))
        name, secret, checksum = _HELD.unpack(held)
        if kdf == _SCRYPT and not compare_digest(checksum, _checksum(name, secret)):
            raise UsageError("the password is wrong, or the secret key is damaged")
        if _public_of(secret[:32]) != secret[32:]:  # minisign writes no checksum for a key without a password
            raise UsageError("the secret key is damaged")
        return cls(PublicKey(name, secret[32:]), secret[:32])

    def text(self) -> str:
        """The text of the key file, not encrypted."""
        secret = self.seed + self.public.raw
        held = _HELD.pack(self.public.id, secret, _checksum(self.public.id, secret))
        raw = _SECRET.pack(_ALGORITHM, _PLAIN, _CHECKSUM, bytes(32), 0, 0, held)
        return f"{_COMMENT}minisign secret key {self.public.name}\n{_encoded(raw)}\n"

    def sign(self, message: bytes, file: str) -> str:
        """The text of a signature file for a message. file: the file name to state in it, besides the time."""
        key = _ed25519_private(self.seed)
        own = key.sign(hashlib.blake2b(message).digest())
        comment = f"timestamp:{int(time.time())}\tfile:{file}\thashed"
        return (
            f"{_COMMENT}signature from icc, key {self.public.name}\n{_encoded(_HASHED + self.public.id + own)}\n"
            f"{_TRUSTED}{comment}\n{_encoded(key.sign(own + comment.encode()))}\n"
        )


def _unpack(form: struct.Struct, text: str, kind: str) -> tuple:
    """The fields of a key, from the last non-empty line of its file."""
    line = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
    try:
        return form.unpack(base64.b64decode(line, validate=True))
    except (struct.error, binascii.Error, ValueError) as error:
        raise UsageError(f"this is no {kind} in minisign's format", "make one: icc keygen, or minisign -G") from error


def _encoded(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def _checksum(name: bytes, secret: bytes) -> bytes:
    return hashlib.blake2b(_ALGORITHM + name + secret, digest_size=32).digest()


def _scrypt(password: bytes, salt: bytes, operations: int, memory: int) -> bytes:
    """The bytes with which a secret key is XORed, as libsodium's crypto_pwhash_scryptsalsa208sha256 derives them with a
    limit of operations and one of bytes."""
    operations = max(operations, 32768)
    if operations < memory // 32:
        parallel, most = 1, operations // (_BLOCK * 4)
    else:
        most = memory // (_BLOCK * 128)
        parallel = 0
    exponent = next((n for n in range(1, 63) if 1 << n > most // 2), 63)
    parallel = parallel or min(operations // 4 // (1 << exponent), 0x3FFFFFFF) // _BLOCK
    if not parallel or 128 * _BLOCK << exponent > _MOST_MEMORY:
        raise UsageError("the secret key is damaged: it asks for more memory than minisign does")
    try:
        return hashlib.scrypt(
            password, salt=salt, n=1 << exponent, r=_BLOCK, p=parallel, maxmem=2 * _MOST_MEMORY - 2, dklen=_HELD.size
        )
    except (MemoryError, ValueError) as error:
        raise UsageError(f"the secret key cannot be decrypted here: {error}", "it takes 1 GiB of memory") from error


def _public_of(seed: bytes) -> bytes:
    return _ed25519_private(seed).public_key().public_bytes_raw()


def _ed25519_private(seed: bytes) -> Ed25519PrivateKey:
    try:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    except ModuleNotFoundError as error:
        raise _missing() from error
    return Ed25519PrivateKey.from_private_bytes(seed)


def _ed25519_public(raw: bytes) -> Ed25519PublicKey:
    try:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    except ModuleNotFoundError as error:
        raise _missing() from error
    return Ed25519PublicKey.from_public_bytes(raw)


def _invalid_signature() -> type[Exception]:
    from cryptography.exceptions import InvalidSignature

    return InvalidSignature


def _missing() -> MissingExtraError:
    return MissingExtraError("signatures need cryptography, which is not installed", install("sign"))

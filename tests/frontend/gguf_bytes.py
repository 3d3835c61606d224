"""GGUF headers written byte by byte, so that each can be wrong in one place."""

from __future__ import annotations

import struct
from typing import Any


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    dims = b"".join(struct.pack("<Q", n) for n in reversed(shape))
    return text(name) + struct.pack("<I", len(shape)) + dims + struct.pack("<IQ", kind, offset)


def header(metadata: list[bytes], infos: list[bytes], **other: Any) -> bytes:
    facts = {"magic": b"GGUF", "version": 3, "tensors": len(infos), "pairs": len(metadata), **other}
    start = struct.pack("<4sIQQ", facts["magic"], facts["version"], facts["tensors"], facts["pairs"])
    return start + b"".join(metadata) + b"".join(infos)


def padded(head: bytes, data: bytes = b"", unit: int = 32) -> bytes:
    return head + b"\0" * (-len(head) % unit) + data


ARCH = pair("general.architecture", 8, text("llama"))
WEIGHT = tensor("w", (2, 32), 2, 0)  # q4_0: 36 bytes
GOOD = padded(header([ARCH], [WEIGHT]), bytes(64))

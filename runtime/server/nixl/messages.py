"""What a server and its NIXL process tell each other: typed structs, MessagePack, 4-byte length prefixes."""

from __future__ import annotations

import msgspec


class Publish(msgspec.Struct, tag=1, array_like=True, frozen=True):
    """Let others read bytes `begin` to `end` of a file; answered by Published or Failure. key: see Forget."""

    id: int
    key: str
    path: str
    begin: int
    end: int


class Forget(msgspec.Struct, tag=2, array_like=True, frozen=True):
    """Let nobody read what was published under a key any more, and forget whom was read from under it."""

    key: str


class FetchBytes(msgspec.Struct, tag=3, array_like=True, frozen=True):
    """Read what another process has published into bytes `begin` to `end` of a file, the first eight of them at last,
    so that nobody takes for whole what is not; answered by Fetched or Failure. key: see Forget."""

    id: int
    key: str
    agent: bytes
    address: int
    path: str
    begin: int
    end: int


class MoverReady(msgspec.Struct, tag=10, array_like=True, frozen=True):
    """There is an agent; error: why there is none."""

    error: str = ""


class Published(msgspec.Struct, tag=11, array_like=True, frozen=True):
    """Where what was published is, for FetchBytes."""

    id: int
    agent: bytes
    address: int


class Fetched(msgspec.Struct, tag=12, array_like=True, frozen=True):
    """It is there."""

    id: int


class Failure(msgspec.Struct, tag=13, array_like=True, frozen=True):
    """It could not be done."""

    id: int
    error: str


ToMover = Publish | Forget | FetchBytes
FromMover = MoverReady | Published | Fetched | Failure


def frame(message: ToMover | FromMover) -> bytes:
    """A message as it is sent; `engine.frames.Frames` cuts it out again."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(4, "little") + body

"""The messages between a server and its NIXL process: typed structs, MessagePack, 4-byte length prefixes."""

from __future__ import annotations

import msgspec


class Publish(msgspec.Struct, tag=1, array_like=True, frozen=True):
    """Allow other agents to read bytes `begin` to `end` of a file; answered by Published or Failure. key: see
    Forget."""

    id: int
    key: str
    path: str
    begin: int
    end: int


class Forget(msgspec.Struct, tag=2, array_like=True, frozen=True):
    """Revoke what was published under a key, and disconnect the agents that were read from under it."""

    key: str


class FetchBytes(msgspec.Struct, tag=3, array_like=True, frozen=True):
    """Read memory that another process has published into bytes `begin` to `end` of a file. The first eight bytes are
    written last, so that an incomplete piece is not taken for a complete one. Answered by Fetched or Failure. key: see
    Forget."""

    id: int
    key: str
    agent: bytes
    address: int
    path: str
    begin: int
    end: int


class MoverReady(msgspec.Struct, tag=10, array_like=True, frozen=True):
    """The agent is ready; error: why there is none, "" if there is."""

    error: str = ""


class Published(msgspec.Struct, tag=11, array_like=True, frozen=True):
    """The agent's metadata and the address of published memory, for FetchBytes."""

    id: int
    agent: bytes
    address: int


class Fetched(msgspec.Struct, tag=12, array_like=True, frozen=True):
    """A FetchBytes is done."""

    id: int


class Failure(msgspec.Struct, tag=13, array_like=True, frozen=True):
    """A Publish or FetchBytes has failed."""

    id: int
    error: str


ToMover = Publish | Forget | FetchBytes
FromMover = MoverReady | Published | Fetched | Failure


def frame(message: ToMover | FromMover) -> bytes:
    """A message as a frame, which `engine.frames.Frames` reads."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(4, "little") + body

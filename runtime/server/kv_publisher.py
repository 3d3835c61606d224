"""KVPublisher: KV events over ZeroMQ in vLLM's form (the extra `routers`), for routers of other projects."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import re
import time
from collections import deque
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import MissingExtraError, UsageError
from .engine.kv_wire import CLEARED

if TYPE_CHECKING:
    from collections.abc import Iterator

log = logging.getLogger("icc.serve")
_END = (-1).to_bytes(8, "big", signed=True)  # the number of the message that ends a replay
_BATCHES, _BYTES = 10_000, 64 << 20  # the most batches and bytes kept for replays, of each replica
_UNSENT = 100_000  # the most batches that a subscriber may lag behind before some are dropped
_encoder = msgspec.msgpack.Encoder()


@dataclass
class _Stream:
    """The sockets of one replica, and its last batches for replays."""

    publisher: Any
    replayer: Any | None
    numbers: Iterator[int] = field(default_factory=lambda: count(time.time_ns() // 1000))
    kept: deque[tuple[int, bytes]] = field(default_factory=deque)
    kept_bytes: int = 0

    def keep(self, number: int, batch: bytes) -> None:
        self.kept.append((number, batch))
        self.kept_bytes += len(batch)
        while len(self.kept) > _BATCHES or self.kept_bytes > _BYTES:
            self.kept_bytes -= len(self.kept.popleft()[1])


class KVPublisher:
    """Publishes the changes of the replicas' prefix caches. A message consists of the topic, a number (8 bytes,
    big-endian) and a batch, the MessagePack array [seconds since 1970, events, replica].

    The first number is the microseconds since 1970, so that numbers grow across restarts: a subscriber would ignore
    lower numbers as old (Dynamo's indexer does).

    endpoint: the address of replica 0's PUB socket; replica n has a port n higher. replay: the same for ROUTER sockets,
    which answer a number with all kept batches from that number on and an end message; None: no replays. UsageError for
    an invalid address, MissingExtraError without pyzmq.
    """

    def __init__(self, endpoint: str, replay: str | None = None, topic: str = "", replicas: int = 1) -> None:
        try:
            import zmq
            import zmq.asyncio
        except ModuleNotFoundError as error:
            why = f"--kv-events needs {error.name}, which is not installed"
            raise MissingExtraError(why, "pip install 'icc-llm[routers]'") from error
        self._topic = topic.encode()
        self._context = zmq.asyncio.Context()
        self._streams: list[_Stream] = []
        self._replaying: list[asyncio.Task[None]] = []
        try:
            for number in range(replicas):
                publisher = zmq.Context(self._context).socket(zmq.PUB)  # same context; PUB never blocks
                self._streams.append(_Stream(publisher, None if replay is None else self._context.socket(zmq.ROUTER)))
                publisher.set_hwm(_UNSENT)
                _bind(publisher, "--kv-events", endpoint, number)
                if replay is not None:
                    _bind(self._streams[-1].replayer, "--kv-events-replay", replay, number)
        except BaseException:
            self.close()
            raise
        for address in filter(None, (endpoint, replay)):
            if not _is_local(address):
                log.warning("anyone who can connect to %s can read the tokens of all prompts", address)

    def start(self) -> None:
        """Start answering requests for replays."""
        self._replaying = [asyncio.create_task(self._replay(one)) for one in self._streams if one.replayer is not None]

    def publish(self, replica: int, events: bytes | None) -> None:
        """Send events encoded by `KVWire`; None: the prefix cache of that replica is empty."""
        stream = self._streams[replica]
        number = next(stream.numbers)
        batch = _encoder.encode([time.time(), msgspec.Raw(CLEARED if events is None else events), replica])
        stream.keep(number, batch)
        stream.publisher.send_multipart([self._topic, number.to_bytes(8, "big"), batch])

    async def _replay(self, stream: _Stream) -> None:
        while True:
            frames = await stream.replayer.recv_multipart()  # type: ignore[union-attr]
            if len(frames) != 3 or len(frames[2]) != 8:
                continue  # not a request of vLLM's clients: identity, an empty frame, a number
            first = int.from_bytes(frames[2], "big")
            answers = [(number.to_bytes(8, "big"), batch) for number, batch in stream.kept if number >= first]
            for number, batch in [*answers, (_END, b"")]:
                await stream.replayer.send_multipart([frames[0], b"", number, batch])  # type: ignore[union-attr]

    def close(self) -> None:
        """Close the sockets; unsent messages are dropped."""
        for task in self._replaying:
            task.cancel()
        for stream in self._streams:
            for one in (stream.publisher, stream.replayer):
                if one is not None:
                    one.close(linger=0)
        with contextlib.suppress(Exception):
            self._context.destroy(linger=0)


def _bind(socket: Any, option: str, endpoint: str, number: int) -> None:
    import zmq

    found = re.fullmatch(r"(tcp://.+:)(\d{1,5})", endpoint)
    if (found is None and not endpoint.startswith("ipc://")) or (found is not None and int(found[2]) + number > 65535):
        raise UsageError(f"{option} {endpoint!r} is no address", "give one like tcp://127.0.0.1:5557")
    address = f"{found[1]}{int(found[2]) + number}" if found else f"{endpoint}{f'_dp{number}' if number else ''}"
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        raise UsageError(f"{option}: cannot listen on {address}: {error}", "give a free port") from error


def _is_local(endpoint: str) -> bool:
    """Whether only this machine can reach an address."""
    host = endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    if not endpoint.startswith("tcp://") or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False

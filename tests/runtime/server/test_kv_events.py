"""KV events over ZeroMQ in vLLM's form, decoded as in vLLM's clients, and followed as in indexers."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from icc.runtime.kv.config import GroupConfig
from icc.runtime.kv.events import AllBlocksCleared, BlockRemoved, BlockStored
from icc.runtime.kv.policy import KeepAll, Latest, Streaming, Window
from icc.runtime.kv.prefix_cache import BlockKey
from icc.runtime.server.engine.kv_wire import KVWire

from .conftest import Served, StartServer

KEY = "a-key-of-thirty-two-characters-00"


def test_events_are_maps_with_vllms_fields() -> None:
    groups = [GroupConfig(8, 2, policy=policy) for policy in (KeepAll(), Window(6), Latest(), Streaming(4, 2))]
    keys = tuple(BlockKey(bytes([number]) * 32) for number in range(1, 4))
    hashes = [int.from_bytes(bytes([number]) * 8, "big") for number in range(1, 4)]
    events = [
        BlockStored(0, keys[1:], keys[0], (5, 6, 7, 8), b"plain", b"\x01"),
        BlockStored(0, keys[:1], None, (5, 6), b"given"),
        BlockStored(1, keys[:1], None, (5, 6), b"plain"),
        BlockRemoved(2, keys),
        AllBlocksCleared(),
    ]
    found = msgspec.msgpack.decode(KVWire(groups, [b"plain"], lambda key: f"name{key[0]}").encode(events))
    common = {"type": "BlockStored", "block_size": 2, "lora_id": None, "medium": "GPU"}
    full = common | {"kv_cache_spec_kind": "full_attention", "group_idx": 0}
    first = {"block_hashes": hashes[1:], "parent_block_hash": hashes[0], "token_ids": [5, 6, 7, 8]}
    one = {"block_hashes": hashes[:1], "parent_block_hash": None, "token_ids": [5, 6], "lora_name": None}
    window = {"group_idx": 1, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 6}
    assert found == [
        full | first | {"lora_name": "name1"},
        full | one | {"extra_keys": [[b"given".hex()]]},
        common | one | window,
        {"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU", "group_idx": 2},
        {"type": "AllBlocksCleared"},
    ]


class Follower:
    """Subscribes to the events of one replica. blocks: the parent's hash and the token ids of each cached block, by its
    hash."""

    def __init__(self, port: int, topic: bytes = b"") -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.SUB)
        self.socket.setsockopt(zmq.SUBSCRIBE, topic)
        seen = self.socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self.socket.connect(f"tcp://127.0.0.1:{port}")
        assert seen.poll(60_000), "no publisher"
        self.socket.disable_monitor()
        time.sleep(0.3)  # the subscription arrives after the handshake
        self.topic, self.numbers, self.ranks = topic, list[int](), set[int]()
        self.blocks: dict[int, tuple[int | None, list[int]]] = {}
        self.names: dict[int, str | None] = {}
        self.batches: list[bytes] = []

    def read_until(self, told: Callable[[], bool]) -> None:
        """Receive batches until `told` is true."""
        while not told():
            assert self.socket.poll(60_000), "nothing comes"
            self._take()

    def drained(self) -> Follower:
        """Receive all batches that have arrived."""
        while self.socket.poll(0):
            self._take()
        return self

    def catch_up(self, replay_port: int) -> None:
        """Receive batches until everything published so far is known."""
        published = [number for number, _ in replayed(replay_port, 0)]
        self.read_until(lambda: not published or self.numbers[-1:] >= published[-1:])

    def _take(self) -> None:
        topic, number, batch = self.socket.recv_multipart()
        assert topic == self.topic and len(number) == 8
        self.numbers.append(int.from_bytes(number, "big"))
        self.batches.append(batch)
        stamp, events, rank = msgspec.msgpack.decode(batch)
        assert abs(stamp - time.time()) < 600
        self.ranks.add(rank)
        for event in events:
            self.apply(event)

    def apply(self, event: dict[str, Any]) -> None:
        if event["type"] == "AllBlocksCleared":
            self.blocks.clear()
        elif event["type"] == "BlockRemoved":
            for name in event["block_hashes"]:
                del self.blocks[name]
        else:
            size, parent = event["block_size"], event["parent_block_hash"]
            for at, name in enumerate(event["block_hashes"]):
                assert parent is None or parent in self.blocks
                self.blocks[name] = parent, event["token_ids"][at * size : (at + 1) * size]
                self.names[name] = event["lora_name"]
                parent = name

    def cached(self, tokens: list[int]) -> int:
        """How many of a prompt's first tokens are in known blocks."""
        parent, at = None, 0
        while True:
            children = [(name, held) for name, (before, held) in self.blocks.items() if before == parent]
            found = next(((name, len(held)) for name, held in children if tokens[at : at + len(held)] == held), None)
            if found is None:
                return at
            parent, at = found[0], at + found[1]

    def close(self) -> None:
        self.context.destroy(linger=0)


def free_ports(count: int) -> int:
    """The first of `count` consecutive free ports."""
    for first in range(20_000 + os.getpid() % 10_000, 60_000, count):
        with contextlib.suppress(OSError), contextlib.ExitStack() as held:
            for port in range(first, first + count):
                held.enter_context(socket.create_server(("127.0.0.1", port)))
            return first
    raise AssertionError


def replayed(port: int, first: int) -> list[tuple[int, bytes]]:
    """The (number, batch) pairs that a replay gives from number `first` on."""
    context = zmq.Context()
    try:
        asker = context.socket(zmq.DEALER)
        asker.connect(f"tcp://127.0.0.1:{port}")
        asker.send_multipart([b"nonsense"])  # gets no answer
        asker.send_multipart([b"", first.to_bytes(8, "big")])
        found: list[tuple[int, bytes]] = []
        while True:
            assert asker.poll(60_000)
            empty, number, batch = asker.recv_multipart()
            assert empty == b""
            if int.from_bytes(number, "big", signed=True) == -1:
                assert batch == b""
                return found
            found.append((int.from_bytes(number, "big"), batch))
    finally:
        context.destroy(linger=0)


@pytest.fixture
def follow() -> Iterator[Any]:
    followers: list[Follower] = []

    def begin(port: int, topic: bytes = b"") -> Follower:
        followers.append(Follower(port, topic))
        return followers[-1]

    yield begin
    for one in followers:
        one.close()


def tokens_of(server: Served, text: str) -> list[int]:
    return server.ask("POST", "/tokenize", {"prompt": text}).json["tokens"]


def cached_by(server: Served, text: str) -> int:
    usage = server.complete(text, max_tokens=1)["usage"]
    return (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)


def test_who_follows_knows_what_the_server_has(start_faulty: StartServer, follow: Any) -> None:
    """The cache has 256 blocks of 4 tokens. The events are followed through eviction and the death of the engine; a
    late follower uses a replay."""
    port = free_ports(2)
    addresses = {"kv_events": f"tcp://127.0.0.1:{port}", "kv_events_replay": f"tcp://127.0.0.1:{port + 1}"}
    server = start_faulty("none", **addresses, kv_events_topic="kv@here")
    follower = follow(port, b"kv@here")
    texts = [f"{chr(97 + number)} " * 60 for number in range(14)]  # more than the cache holds
    for text in texts:
        server.complete(text, max_tokens=8)
        follower.catch_up(port + 1)
    assert len(follower.blocks) <= 256 and follower.ranks == {0}
    known = {text: follower.cached(tokens_of(server, text)) for text in texts}
    assert known[texts[0]] < known[texts[-1]] == len(tokens_of(server, texts[-1])) // 4 * 4
    for text in reversed(texts):  # the last one first: asking evicts only texts that were asked before
        told = follower.cached(tokens_of(server, text))
        most = (len(tokens_of(server, text)) - 1) // 4 * 4  # the last token is always computed
        assert cached_by(server, text) == min(told, most), text
        follower.catch_up(port + 1)
    assert follower.numbers == list(range(follower.numbers[0], follower.numbers[0] + len(follower.numbers)))
    pid = server.engine_pid
    os.kill(pid, signal.SIGKILL)
    server.wait_until(
        lambda: server.metric("icc:engine_restarts_total") == 1 and server.metric("icc:engine_ready") == 1
    )
    follower.read_until(lambda: not follower.blocks)
    server.complete(texts[0], max_tokens=1)
    follower.catch_up(port + 1)
    assert follower.cached(tokens_of(server, texts[0])) == len(tokens_of(server, texts[0])) // 4 * 4
    first = follower.numbers[3]
    assert replayed(port + 1, first) == list(zip(follower.numbers[3:], follower.batches[3:], strict=True))
    late = follow(port, b"kv@here")
    for _, batch in replayed(port + 1, 0):
        for event in msgspec.msgpack.decode(batch)[1]:
            late.apply(event)
    assert late.blocks == follower.blocks


def test_each_replica_has_a_port(start_faulty: StartServer, follow: Any) -> None:
    port = free_ports(2)
    server = start_faulty("none", replicas=2, kv_events=f"tcp://127.0.0.1:{port}")
    followers = [follow(port), follow(port + 1)]
    text = "abc " * 10
    for _ in range(2):
        server.complete(text, max_tokens=1)
    tokens = tokens_of(server, text)
    # the second request went to the same replica
    server.wait_until(lambda: sorted(follower.drained().cached(tokens) for follower in followers) == [0, 40])
    for number, follower in enumerate(followers):
        assert follower.ranks <= {number}


def begins(follower: Follower) -> list[dict[str, Any]]:
    """The events of the first blocks of prompts."""
    events = [event for batch in follower.batches for event in msgspec.msgpack.decode(batch)[1]]
    return [event for event in events if event["type"] == "BlockStored" and event["parent_block_hash"] is None]


def test_salts_of_requests_set_blocks_apart(start: StartServer, follow: Any) -> None:
    port = free_ports(1)
    server = start("--kv-events", f"tcp://127.0.0.1:{port}", key=KEY)
    follower = follow(port)
    server.complete("abc " * 20, max_tokens=1)
    server.complete("xyz " * 20, max_tokens=1, cache_salt="mine")
    follower.read_until(lambda: len(begins(follower)) == 2)
    plain, salted = (event.get("extra_keys") for event in begins(follower))
    assert plain is None and len(salted[0][0]) == 64 and set(salted[1:]) <= {None}


@pytest.mark.parametrize(
    "options, words",
    [
        (("--kv-events", "localhost"), "--kv-events 'localhost' is no address"),
        (("--kv-events", "tcp://127.0.0.1:99999"), "--kv-events 'tcp://127.0.0.1:99999' is no address"),
        (("--kv-events", "tcp://192.0.2.1:5557"), "--kv-events: cannot listen on tcp://192.0.2.1:5557"),
        (("--kv-events-replay", "tcp://127.0.0.1:5558"), "give --kv-events tcp://127.0.0.1:5557"),
    ],
)
def test_what_cannot_be(start: StartServer, options: tuple[str, ...], words: str, tmp_path: Path) -> None:
    server = start(*options, wait=False)
    assert server.process.wait(60) == 2
    assert words in server.log.read_text()

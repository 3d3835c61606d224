"""The KV events that subscribers over gRPC receive."""

from __future__ import annotations

import asyncio
import os
import signal

import grpc
import pytest
from icc.runtime.server.api.errors import HttpError
from icc.runtime.server.engine import kv_wire
from icc.runtime.server.engine.kv_wire import StoredMap
from icc.runtime.server.grpc import kv_feed
from icc.runtime.server.grpc.errors import as_call_error
from icc.runtime.server.grpc.kv_feed import KVFeed
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import common_pb2

from ..conftest import StartServer
from .conftest import Client

pytestmark = pytest.mark.slow


class KVFollower:
    """Follows the batches of a subscription. blocks: the parent's hash and the token ids of each block, by its hash."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int | None, list[int]]] = {}
        self.numbers: list[int] = []

    def take(self, batch: common_pb2.KvEventBatch) -> None:
        self.numbers.append(batch.sequence_number)
        for event in batch.events:
            kind = event.WhichOneof("data")
            if kind == "cleared":
                self.blocks.clear()
            elif kind == "removed":
                for name in event.removed.block_hashes:
                    del self.blocks[name]
            else:
                parent = event.stored.parent_block_hash if event.stored.HasField("parent_block_hash") else None
                for block in event.stored.blocks:
                    assert parent is None or parent in self.blocks
                    assert len(block.token_ids) == block.block_size
                    self.blocks[block.block_hash] = parent, list(block.token_ids)
                    parent = block.block_hash

    def cached(self, tokens: list[int]) -> int:
        parent, at = None, 0
        while found := [
            (name, held)
            for name, (before, held) in self.blocks.items()
            if before == parent and tokens[at : at + len(held)] == held
        ]:
            parent, at = found[0][0], at + len(found[0][1])
        return at


def test_who_subscribes_knows_what_the_server_has(start_faulty: StartServer) -> None:
    """The cache has 256 blocks of 4 tokens. One subscriber follows from the beginning through eviction and the death of
    the engine, another starts with a snapshot."""
    client = Client(server := start_faulty("none", grpc_port=0))
    early = client.stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest(), timeout=120)
    follower = KVFollower()
    follower.take(first := next(early))
    assert first.snapshot.count == 1 and first.events[0].WhichOneof("data") == "cleared" and not follower.blocks
    prompts = [[97 + number, 32] * 60 for number in range(14)]  # more than the cache holds
    for prompt in prompts:
        client.complete(prompt, max_tokens=8)
        while follower.cached(prompt) < 120:
            follower.take(next(early))
    assert len(follower.blocks) <= 256 and follower.cached(prompts[0]) < 120
    late = KVFollower()
    subscription = client.stub.SubscribeKvEvents(
        common_pb2.SubscribeKvEventsRequest(start_sequence_number=1), timeout=120
    )
    late.take(batch := next(subscription))
    assert batch.snapshot.count == 1 and batch.snapshot.blocks == len(late.blocks)
    while follower.numbers[-1] < batch.sequence_number:
        follower.take(next(early))
    assert late.blocks == follower.blocks and late.numbers[-1] == follower.numbers[-1]
    for prompt in prompts[-3:]:
        assert client.complete(prompt, max_tokens=1).cached_tokens == min(late.cached(prompt), 116)
    os.kill(server.engine_pid, signal.SIGKILL)
    while late.blocks:
        late.take(next(subscription))
    assert late.numbers == list(range(late.numbers[0], late.numbers[0] + len(late.numbers)))
    follower.take(next(early))
    server.wait_until(lambda: client.stub.HealthCheck(pb.HealthCheckRequest()).healthy)
    last = next(client.stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest(), timeout=120)).sequence_number
    known = common_pb2.SubscribeKvEventsRequest(start_sequence_number=last + 1)
    continued = client.stub.SubscribeKvEvents(known, timeout=120)
    list(continued.initial_metadata())
    client.complete(prompts[0], max_tokens=1)
    batch = next(continued)
    assert not batch.HasField("snapshot") and batch.sequence_number == last + 1


def test_a_snapshot_comes_in_numbered_pieces_and_keeps_what_events_said() -> None:
    feed = KVFeed(2)
    names = [(1 << 63) + number for number in range(1200)]
    stored = StoredMap(
        names,
        None,
        tuple(range(2400)),
        2,
        None,
        "GPU",
        "an-adapter",
        [["salt"], *[None] * 1199],
        1,
        "sliding_window",
        6,
    )
    feed.publish(1, kv_wire._encoder.encode([stored]))
    batches = list(feed._snapshot())
    assert [batch.dp_rank for batch in batches] == [0, 1, 1, 1]
    assert [(b.snapshot.index, b.snapshot.count, b.snapshot.blocks) for b in batches[1:]] == [
        (0, 3, 1200), (1, 3, 1200), (2, 3, 1200)
    ]  # fmt: skip
    numbers = [batch.sequence_number for batch in batches]
    assert numbers == list(range(feed._number - 3, feed._number + 1))
    events = [event for batch in batches[1:] for event in batch.events]
    assert events[0].WhichOneof("data") == "cleared" and len(events) == 1201
    first, second = events[1].stored, events[2].stored
    assert first.blocks[0].block_hash == -(1 << 63) == second.parent_block_hash and not first.HasField(
        "parent_block_hash"
    )
    assert first.blocks[0].extra_keys[0].text == "salt" and not second.blocks[0].extra_keys
    assert (second.lora_name, second.group_idx, second.kv_cache_spec_kind) == ("an-adapter", 1, "sliding_window")
    assert (
        second.kv_cache_spec_sliding_window == 6
        and second.medium == "GPU"
        and list(second.blocks[0].token_ids) == [2, 3]
    )


def test_a_subscriber_that_falls_behind_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_feed, "_UNSENT", 2)

    async def follow() -> list[bool]:
        feed, seen = KVFeed(1), list[bool]()
        batches = feed.batches(0)
        seen.append((await anext(batches)).HasField("snapshot"))
        for _ in range(4):
            feed.publish(0, None)
        with pytest.raises(HttpError, match="subscribe again") as error:
            async for batch in batches:
                seen.append(batch.HasField("snapshot"))
        assert as_call_error(error.value).status is grpc.StatusCode.RESOURCE_EXHAUSTED and not feed._subscribers
        return seen

    assert asyncio.run(follow()) == [True, False, False]

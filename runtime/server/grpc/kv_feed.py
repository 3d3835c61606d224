"""KVFeed: the contents of the prefix caches for subscribers: first a snapshot, then every change."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from itertools import islice

import msgspec
from smg_grpc_proto.generated import common_pb2 as pb

from ..api.errors import HttpError
from ..engine.kv_wire import ClearedMap, RemovedMap, StoredMap

_UNSENT = 10_000  # the most batches that a subscriber may lag behind
_CHUNK = 500  # blocks in a message of a snapshot
_decoder = msgspec.msgpack.Decoder(list[StoredMap | RemovedMap | ClearedMap])
Event = StoredMap | RemovedMap | ClearedMap
Blocks = dict[tuple[int | None, int], StoredMap]  # by (group, hash): an event of one block each


class KVFeed:
    """KV events of all replicas, with one sequence of numbers; `dp_rank` of a batch is its replica.

    The first number is the microseconds since 1970, so that numbers grow across restarts. The current blocks are kept
    as events (some 40 bytes a token), so that a late or returning subscriber gets a snapshot instead of the whole
    history.
    """

    def __init__(self, replicas: int) -> None:
        self._blocks: list[Blocks] = [{} for _ in range(replicas)]
        self._number = time.time_ns() // 1000
        self._events = 0
        self._subscribers: set[asyncio.Queue[pb.KvEventBatch]] = set()

    def publish(self, replica: int, events: bytes | None) -> None:
        """Publish events encoded by `KVWire`; None: the prefix cache of that replica is empty."""
        found: list[Event] = [ClearedMap()] if events is None else _decoder.decode(events)
        for event in found:
            _apply(self._blocks[replica], event)
        self._number += 1
        if not self._subscribers:
            return
        batch = pb.KvEventBatch(sequence_number=self._number, timestamp=time.time(), dp_rank=replica)
        for event in found:
            self._events += 1
            batch.events.append(_message(event, self._events))
        for queue in list(self._subscribers):
            if queue.full():
                self._subscribers.discard(queue)  # it gets an error once it has read its queue
            else:
                queue.put_nowait(batch)

    async def batches(self, start: int) -> AsyncIterator[pb.KvEventBatch]:
        """A snapshot of every replica, then all changes. start: the next number that the subscriber expects; there is
        no snapshot if that is the next number. HttpError 429 for a subscriber that falls behind."""
        queue: asyncio.Queue[pb.KvEventBatch] = asyncio.Queue(_UNSENT)
        snapshot = [] if start == self._number + 1 else list(self._snapshot())
        self._subscribers.add(queue)
        try:
            for batch in snapshot:
                yield batch
            while queue in self._subscribers or not queue.empty():
                yield await queue.get()
            raise HttpError(429, "KV events were not read fast enough: subscribe again", code="too_slow")
        finally:
            self._subscribers.discard(queue)

    def _snapshot(self) -> Iterator[pb.KvEventBatch]:
        """The current blocks as batches; the last has the number of the latest published batch."""
        chunks = [list(_chunks(blocks)) for blocks in self._blocks]
        number = self._number - sum(map(len, chunks))
        for replica, parts in enumerate(chunks):
            for index, part in enumerate(parts):
                number += 1
                batch = pb.KvEventBatch(sequence_number=number, timestamp=time.time(), dp_rank=replica)
                batch.events.extend([_message(ClearedMap(), 0)] if index == 0 else [])
                batch.events.extend(_message(event, 0) for event in part)
                whole = len(self._blocks[replica])
                batch.snapshot.CopyFrom(pb.KvSnapshotChunk(index=index, count=len(parts), blocks=whole))
                yield batch


def _chunks(blocks: Blocks) -> Iterator[list[StoredMap]]:
    """The events of blocks in lists of up to _CHUNK, at least one list."""
    left = iter(blocks.values())
    yield list(islice(left, _CHUNK))
    while part := list(islice(left, _CHUNK)):
        yield part


def _apply(blocks: Blocks, event: Event) -> None:
    if isinstance(event, ClearedMap):
        blocks.clear()
    elif isinstance(event, RemovedMap):
        for name in event.block_hashes:
            blocks.pop((event.group_idx, name), None)
    else:
        parent, size = event.parent_block_hash, event.block_size
        for at, name in enumerate(event.block_hashes):
            blocks.pop((event.group_idx, name), None)  # a block that is stored again moves behind its parent
            blocks[event.group_idx, name] = msgspec.structs.replace(
                event,
                block_hashes=[name],
                parent_block_hash=parent,
                token_ids=event.token_ids[at * size : (at + 1) * size],
                extra_keys=None if event.extra_keys is None else event.extra_keys[at : at + 1],
            )
            parent = name


def _message(event: Event, number: int) -> pb.KvCacheEvent:
    if isinstance(event, ClearedMap):
        return pb.KvCacheEvent(event_id=number, cleared=pb.KvCacheCleared())
    common = {
        "tier": pb.KV_CACHE_TIER_DEVICE, "medium": event.medium, "group_idx": event.group_idx,
        "locality": pb.KV_CACHE_LOCALITY_LOCAL,
    }  # fmt: skip
    if isinstance(event, RemovedMap):
        names = [_signed(name) for name in event.block_hashes]
        return pb.KvCacheEvent(event_id=number, removed=pb.KvBlocksRemoved(block_hashes=names, **common))
    parent = event.parent_block_hash
    stored = pb.KvBlocksStored(
        blocks=list(_block_messages(event)),
        parent_block_hash=None if parent is None else _signed(parent),
        kv_cache_spec_kind=event.kv_cache_spec_kind,
        kv_cache_spec_sliding_window=event.kv_cache_spec_sliding_window,
        lora_name=event.lora_name,
        **common,
    )
    return pb.KvCacheEvent(event_id=number, stored=stored)


def _block_messages(event: StoredMap) -> Iterator[pb.KvBlock]:
    size = event.block_size
    for at, name in enumerate(event.block_hashes):
        keys = (event.extra_keys[at] if event.extra_keys else None) or ()
        yield pb.KvBlock(
            block_hash=_signed(name),
            token_ids=event.token_ids[at * size : (at + 1) * size],
            block_size=size,
            extra_keys=[pb.KvBlockExtraKey(text=key) for key in keys],
        )


def _signed(name: int) -> int:
    """A 64-bit hash as the signed integer of the protocol."""
    return name - (1 << 64) if name >= 1 << 63 else name

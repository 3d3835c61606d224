"""KVWire: KV events in the form that vLLM publishes since June 2026 (vllm/distributed/kv_events.py, vllm#42892) and
that routers read: MessagePack maps with a field `type`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from ...kv import events as kv
from ...kv.config import GroupConfig
from ...kv.policy import CachePolicy, KeepAll, Latest, Window
from ...kv.prefix_cache import BlockKey

# The medium of every block, on CPUs too: for routers, "CPU" is the memory to which blocks were offloaded.
MEDIUM = "GPU"


class StoredMap(msgspec.Struct, tag="BlockStored", omit_defaults=True):
    """Blocks were added to the prefix cache; the fields are vLLM's. extra_keys: per block, the salt that a request
    needs to find it."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: tuple[int, ...]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[str] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class RemovedMap(msgspec.Struct, tag="BlockRemoved", omit_defaults=True):
    """Blocks were removed from the prefix cache in a medium."""

    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class ClearedMap(msgspec.Struct, tag="AllBlocksCleared"):
    """The prefix cache was emptied."""


CLEARED = msgspec.msgpack.encode([ClearedMap()])
_encoder = msgspec.msgpack.Encoder()


class KVWire:
    """Encodes the events of an engine's KV groups. plain: salts that are not published. adapter: gives the name for
    `BlockStored.own_salt`."""

    def __init__(
        self, groups: Sequence[GroupConfig], plain: Sequence[bytes], adapter: Callable[[bytes], str] = bytes.hex
    ) -> None:
        self._sizes = [group.block_size for group in groups]
        self._kinds = [spec_kind(group.policy) for group in groups]
        self._plain, self._adapter = {b"", *plain}, adapter

    def encode(self, events: Sequence[kv.KVEvent]) -> bytes:
        """Events as a MessagePack array of maps."""
        return _encoder.encode(list(map(self._struct, events)))

    def _struct(self, event: kv.KVEvent) -> StoredMap | RemovedMap | ClearedMap:
        if isinstance(event, kv.AllBlocksCleared):
            return ClearedMap()
        hashes = list(map(block_hash, event.keys))
        if isinstance(event, kv.BlockRemoved):
            return RemovedMap(hashes, MEDIUM, event.group)
        extra: list[list[str] | None] | None = None
        if event.salt not in self._plain and event.parent is None:
            extra = [[event.salt.hex()], *[None] * (len(hashes) - 1)]
        return StoredMap(
            hashes,
            None if event.parent is None else block_hash(event.parent),
            event.tokens,
            self._sizes[event.group],
            None,
            MEDIUM,
            self._adapter(event.own_salt) if event.own_salt else None,
            extra,
            event.group,
            *self._kinds[event.group],
        )


def block_hash(key: BlockKey) -> int:
    """A block's hash in events: the first 64 bits of its key."""
    return int.from_bytes(key.digest[:8], "big")


def spec_kind(policy: CachePolicy) -> tuple[str | None, int | None]:
    """(vLLM's name for a group with this policy, tokens of its window); each is None if there is none."""
    if isinstance(policy, Window):
        return "sliding_window", policy.size
    kinds = {KeepAll: "full_attention", Latest: "mamba"}
    return kinds.get(type(policy)), None

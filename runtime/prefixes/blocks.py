"""The KV blocks of a prefix as bytes: read from a cache, and written into one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b

import msgspec

from ..executor.base import Executor, KVExecutor
from ..format.manifest import Manifest
from ..kv.cache import KVCache
from ..kv.sequence import CachedSequence

_NO_PART = ("report.json", "canaries.json", "runtime/", "click/", "tokenizer/", "__main__.py", "prompts", "grammars")


def digest_of(manifest: Manifest) -> bytes:
    """What computes the same KV, byte by byte, has the same: program, kernels and weights."""
    files = [(name, entry.sha256) for name, entry in sorted(manifest.files.items()) if not name.startswith(_NO_PART)]
    return blake2b(msgspec.msgpack.encode(files), digest_size=32, person=b"icc-kv-engine").digest()


def in_reach(executor: Executor) -> KVExecutor | None:
    """The executor, if the blocks of its cache can be read and written here; else None."""
    return executor if isinstance(executor, KVExecutor) and executor.kv_in_reach else None


class KVBlocks:
    """The blocks of an engine's cache. identity: of what computed them and how they are laid out; what has another
    must not be written here. sizes: bytes of a block in each KV group."""

    def __init__(self, engine: bytes, executor: KVExecutor) -> None:
        """engine: `digest_of` its manifest. executor: one that is `in_reach`."""
        self._executor = executor
        self.sizes = [sum(map(len, executor.kv_views(n, 0))) for n in range(len(executor.groups))]
        layout = [(repr(group.policy), group.block_size) for group in executor.groups]
        self.identity = blake2b(engine + msgspec.msgpack.encode([layout, self.sizes]), digest_size=32).digest()

    def views(self, group: int, block: int) -> list[memoryview]:
        """The bytes of a block in each layer of its group, writable."""
        return self._executor.kv_views(group, block)

    def read(self, found: Sequence[dict[int, int]]) -> Iterator[memoryview]:
        """The bytes of blocks that `KVCache.found` has, group by group, each by its number."""
        for group, held in enumerate(found):
            for number in sorted(held):
                yield from self.views(group, held[number])

    def nbytes(self, numbers: Sequence[Sequence[int]]) -> int:
        """Bytes of blocks with these numbers in each group."""
        return sum(len(some) * size for some, size in zip(numbers, self.sizes, strict=True))

    def adopt(
        self, kv: KVCache, sequence: CachedSequence, length: int, numbers: Sequence[Sequence[int]], content: memoryview
    ) -> bool:
        """Put what is kept of a sequence's first `length` tokens where the prefix cache finds it; False where there is
        no room now. numbers: of the blocks in each group whose bytes follow each other in `content`; ValueError where
        they are not those that are needed."""
        if len(content) != self.nbytes(numbers) or length % kv.multiple:
            raise ValueError("it has other blocks")
        for group, given in zip(kv.groups, numbers, strict=True):
            if not set(group.numbers(length)) <= set(given):
                raise ValueError("blocks are missing")
        adopted = kv.adopt(sequence, length)
        if adopted is None:
            return False
        at = 0
        for group, given in enumerate(numbers):
            for number in given:
                block = adopted[group].get(number)
                if block is not None:
                    self.write(group, block, content[at : at + self.sizes[group]])
                at += self.sizes[group]
        return True

    def write(self, group: int, block: int, content: memoryview) -> None:
        """Put the bytes of a block, all layers one after the other, in its place."""
        at = 0
        for view in self.views(group, block):
            view[:] = content[at : at + len(view)]
            at += len(view)

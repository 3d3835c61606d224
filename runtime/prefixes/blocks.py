"""The KV blocks of a prefix as bytes: reads them from a cache and writes them into one."""

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
    """A digest of program, kernels and weights: engines with the same digest compute the same KV, byte by byte."""
    files = [(name, entry.sha256) for name, entry in sorted(manifest.files.items()) if not name.startswith(_NO_PART)]
    return blake2b(msgspec.msgpack.encode(files), digest_size=32, person=b"icc-kv-engine").digest()


def in_reach(executor: Executor) -> KVExecutor | None:
    """The executor, if this process can read and write the blocks of its cache; else None."""
    return executor if isinstance(executor, KVExecutor) and executor.kv_in_reach else None


class KVBlocks:
    """The blocks of an engine's cache. identity: a digest of the engine that computes them and of their layout; blocks
    of another identity must not be written here. sizes: the size in bytes of a block in each KV group."""

    def __init__(self, engine: bytes, executor: KVExecutor) -> None:
        """engine: `digest_of` its manifest. executor: must be `in_reach`."""
        self._executor = executor
        self.sizes = [sum(map(len, executor.kv_views(n, 0))) for n in range(len(executor.groups))]
        layout = [(repr(group.policy), group.block_size) for group in executor.groups]
        self.identity = blake2b(engine + msgspec.msgpack.encode([layout, self.sizes]), digest_size=32).digest()

    def views(self, group: int, block: int) -> list[memoryview]:
        """Writable views of a block's bytes in each layer of its group."""
        return self._executor.kv_views(group, block)

    def read(self, found: Sequence[dict[int, int]]) -> Iterator[memoryview]:
        """Views of the bytes of blocks from `KVCache.found`, group by group, in the order of their indices."""
        for group, held in enumerate(found):
            for number in sorted(held):
                yield from self.views(group, held[number])

    def nbytes(self, numbers: Sequence[Sequence[int]]) -> int:
        """The size in bytes of blocks with these indices in each group."""
        return sum(len(some) * size for some, size in zip(numbers, self.sizes, strict=True))

    def adopt(
        self, kv: KVCache, sequence: CachedSequence, length: int, numbers: Sequence[Sequence[int]], content: memoryview
    ) -> bool:
        """Write the blocks that are kept of a sequence's first `length` tokens into the prefix cache; False if there is
        no room now. numbers: for each group, the indices of the blocks in `content`, in the order of their bytes.
        ValueError if needed blocks are missing or sizes differ."""
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
        """Write a block's bytes, all layers one after the other, to the cache."""
        at = 0
        for view in self.views(group, block):
            view[:] = content[at : at + len(view)]
            at += len(view)

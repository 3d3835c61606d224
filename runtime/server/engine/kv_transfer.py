"""KVTransfer: moves KV blocks of a prompt between engine processes of one host, through shared memory."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ...executor.base import KVExecutor
from ...kv.cache import KVCache
from ...kv.sequence import CachedSequence
from ...llm import LLM
from ...prefixes.blocks import KVBlocks, digest_of, in_reach
from .kv_file import KEPT_S, KV_FOLDER, PREFIX, KVPart, KVReader, KVWriter, is_kv_name, sum_of
from .messages import KVGiven, Submit

if TYPE_CHECKING:
    from ...adapters.resident import ResidentAdapters

log = logging.getLogger("icc.engine")


@dataclass(eq=False)
class _Gift:
    """A prompt whose KV is being given. length, blocks: how many of its tokens were given so far, in how many
    blocks."""

    sequence: CachedSequence
    file: KVWriter | None = None
    length: int = 0
    blocks: int = 0


@dataclass(eq=False)
class _Taking:
    """A prompt whose KV is being taken. sequence: its tokens read so far; prompt: all of them, None if unknown yet."""

    file: KVReader
    sequence: CachedSequence
    prompt: tuple[int, ...] | None = None
    begun: float = field(default_factory=time.monotonic)


class KVTransfer:
    """Gives and takes blocks of an engine. engine: a digest, which both engines must share, as well as the cache
    layout. executor: one whose cache is in host memory. folder: for the files, shared by all engine processes of a user
    on this host. shared_length: see RequestTable."""

    def __init__(
        self,
        engine: bytes,
        executor: KVExecutor,
        folder: Path,
        shared_length: Callable[[Sequence[int]], int] = lambda tokens: 0,
    ) -> None:
        blocks = KVBlocks(engine, executor)
        self._views, self._sizes, self._engine = blocks.views, blocks.sizes, blocks.identity
        self._folder, self._shared_length = folder, shared_length
        self._gifts: dict[int, _Gift] = {}
        self._taking: dict[str, _Taking] = {}

    @classmethod
    def of(cls, llm: LLM) -> KVTransfer | None:
        """The KVTransfer of a loaded engine; None if its cache cannot be accessed from this process."""
        executor = in_reach(llm.executor)
        if executor is None:
            return None
        return cls(digest_of(llm.manifest), executor, KV_FOLDER, llm.loop.requests.shared_length)

    # -- giving ------------------------------------------------------------------------------------------------------

    def give(self, kv: KVCache, submit: Submit) -> KVGiven | None:
        """Publish the cached blocks of a prompt's prefix that were not given before; None if there are none, or they
        cannot be written. May be called after each step, until `end`."""
        gift = self._gifts.get(submit.id)
        if gift is None:
            sequence = sequence_of(submit, self._shared_length)
            if sequence is None:
                return None
            gift = self._gifts[submit.id] = _Gift(sequence)
        length = kv.cached_length(gift.sequence)
        found = kv.found(gift.sequence, length) if length > gift.length else None
        if found is None:
            return None
        sizes = [group.block_size for group in kv.groups]
        fresh = [[n for n in held if n >= gift.length // size] for held, size in zip(found, sizes, strict=True)]
        nbytes = sum(len(numbers) * size for numbers, size in zip(fresh, self._sizes, strict=True))
        views = [[self._views(group, found[group][n]) for n in ns] for group, ns in enumerate(fresh)]
        sums = tuple(tuple(map(sum_of, blocks)) for blocks in views)
        tokens, numbers = submit.prompt[gift.length : length], tuple(map(tuple, fresh))
        part = KVPart(self._engine, gift.length, tokens, numbers, nbytes, sums)
        try:
            gift.file = gift.file or KVWriter(self._folder, submit.kv_name)
            gift.file.write(part, [view for blocks in views for block in blocks for view in block])
        except OSError as error:
            log.warning("the KV of a prompt is not given: %s", error.strerror)
            return None
        gift.length, gift.blocks = length, gift.blocks + sum(map(len, fresh))
        return KVGiven(submit.id, gift.file.name, length, gift.blocks, gift.file.size)

    def end(self, submit_id: int, remove: bool = False) -> None:
        """Finish giving a prompt. remove: whether to delete what was given."""
        gift = self._gifts.pop(submit_id, None)
        if gift is not None and gift.file is not None:
            gift.file.close(remove)

    # -- taking ------------------------------------------------------------------------------------------------------

    def take_parts(self, kv: KVCache, name: str, salt: bytes) -> int:
        """Take the parts so far of a prompt that still runs elsewhere into the prefix cache; returns how many tokens
        were added. A part for which there are no free blocks is tried again at the next call."""
        try:
            taking = self._taking.get(name)
            if taking is None:
                taking = self._taking[name] = _Taking(KVReader(self._folder, name), CachedSequence(salt=salt))
            return self._adopt_all(kv, taking)
        except (OSError, ValueError, msgspec.DecodeError) as error:
            log.warning("the KV of a prompt cannot be taken: %s", error)
            return 0

    def take(self, kv: KVCache, submit: Submit) -> int:
        """Take the parts of a prompt's prefix that were not taken before into the prefix cache; returns how many tokens
        were added. What cannot be taken is computed here."""
        sequence, taking = sequence_of(submit, self._shared_length), self._taking.pop(submit.takes_kv, None)
        try:
            if sequence is None:
                return 0
            taking = taking or _Taking(KVReader(self._folder, submit.takes_kv), CachedSequence(salt=submit.salt))
            taking.file.path.unlink(missing_ok=True)  # a file is taken once
            taking.prompt = submit.prompt
            count = self._adopt_all(kv, taking)
            if taking.file.part() is None and not taking.file.ended:
                there = len(taking.sequence.tokens)
                log.warning("the KV of a prompt was cut after %d tokens: the rest is computed", there)
            return count
        except (OSError, ValueError, msgspec.DecodeError) as error:
            log.warning("the KV of a prompt cannot be taken: %s", error)
            return 0
        finally:
            if taking is not None:
                taking.file.close()

    def drop(self, name: str) -> None:
        """Stop taking the KV under a name, and remove its file."""
        if (taking := self._taking.pop(name, None)) is not None:
            taking.file.close()
        if is_kv_name(name):
            with contextlib.suppress(OSError):
                (self._folder / name).unlink()

    def _adopt_all(self, kv: KVCache, taking: _Taking) -> int:
        """Take all complete parts; returns how many tokens were added."""
        count = 0
        while (part := taking.file.part()) is not None:
            if not self._adopt(kv, taking, part):
                break
            taking.file.done(part)
            count += len(part.tokens)
        return count

    def _adopt(self, kv: KVCache, taking: _Taking, part: KVPart) -> bool:
        """Take a part; False if there are not enough free blocks now. ValueError if the part does not fit this engine
        or prompt."""
        sequence, length = taking.sequence, part.length
        if part.engine != self._engine:
            raise ValueError("it is of another engine, or one with another cache layout")
        del sequence.tokens[part.begin :]  # from an earlier attempt at this part
        if part.begin != len(sequence.tokens):
            raise ValueError("a part is missing")
        if taking.prompt is not None and part.tokens != taking.prompt[part.begin : length]:
            raise ValueError("it is of another prompt")
        sizes = [group.block_size for group in kv.groups]
        if any(length % size for size in sizes) or part.nbytes != sum(
            len(numbers) * size for numbers, size in zip(part.numbers, self._sizes, strict=True)
        ):
            raise ValueError("it has other blocks")
        sequence.tokens += part.tokens
        sequence.salt_from = self._shared_length(sequence.tokens)
        for group, numbers in zip(kv.groups, part.numbers, strict=True):
            lacking = {number for number, block in group.prefixes.found(sequence, length).items() if block is None}
            if not lacking <= set(numbers):
                raise ValueError("what comes before it is not here any more")
        adopted = kv.adopt(sequence, length)
        if adopted is None:
            return False
        try:
            self._fill(taking.file, part, adopted)
        except (OSError, ValueError):
            for group, blocks in zip(kv.groups, adopted, strict=True):
                for block in blocks.values():  # or other prompts would find blocks that were never written
                    group.pool.discard(block)
            raise
        return True

    def _fill(self, file: KVReader, part: KVPart, adopted: list[dict[int, int]]) -> None:
        """Copy the bytes of a part into the blocks allocated for it. adopted: by KV group, {number: block}."""
        at = 0
        for group, (numbers, sums) in enumerate(zip(part.numbers, part.sums, strict=True)):
            for number, expected in zip(numbers, sums, strict=True):
                if number in adopted[group]:
                    views = self._views(group, adopted[group][number])
                    file.read(at, views)
                    if sum_of(views) != expected:
                        raise ValueError("a block has changed on its way")
                at += self._sizes[group]

    def sweep(self) -> None:
        """Remove KV that was never taken, and files that ended processes have left."""
        for name, taking in list(self._taking.items()):
            if time.monotonic() - taking.begun > 10 * KEPT_S:
                self._taking.pop(name).file.close()
        for path in self._folder.glob(f"{PREFIX}*"):
            try:
                found = path.lstat()
                if found.st_uid == os.geteuid() and time.time() - found.st_mtime > KEPT_S:
                    path.unlink()
            except OSError:
                continue  # another process has taken it


def sequence_of(
    submit: Submit,
    shared_length: Callable[[Sequence[int]], int],
    adapters: ResidentAdapters | None = None,
) -> CachedSequence | None:
    """A prompt as a sequence of the prefix cache; None if its KV depends on more than its tokens, its salt and an
    adapter of `adapters`. adapters: None if no adapters are allowed. shared_length: see RequestTable. RequestError for
    an unknown adapter."""
    if submit.extras or (submit.adapter and adapters is None):
        return None
    if submit.adapter and adapters is not None:
        salt, first = adapters.salt_of(submit.adapter, submit.adapter_scale, submit.prompt)
        return CachedSequence(tokens=list(submit.prompt), salt=submit.salt, own_salt=salt, own_from=first)
    return CachedSequence(tokens=list(submit.prompt), salt=submit.salt, salt_from=shared_length(submit.prompt))

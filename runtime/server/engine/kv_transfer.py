"""KVTransfer: KV blocks of a prompt go from one engine process to another of this host, as files in shared memory."""

from __future__ import annotations

import logging
import mmap
import os
import re
import secrets
import stat
import tempfile
import time
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path

import msgspec

from ...executor.base import KVExecutor
from ...format.manifest import Manifest
from ...kv.cache import KVCache
from ...kv.sequence import CachedSequence
from ...llm import LLM
from .messages import KVGiven, Submit

log = logging.getLogger("icc.engine")
_NAME = re.compile(r"icc-kv-[0-9a-f]{32}")
_KEPT_S = 60.0  # that blocks wait to be taken


class _Header(msgspec.Struct, array_like=True, frozen=True):
    """What a file holds. engine: a digest of what computed it. numbers: of the blocks of each KV group, in the order in
    which their bytes follow; tokens: the beginning of a prompt that they hold."""

    engine: bytes
    numbers: tuple[tuple[int, ...], ...]
    tokens: tuple[int, ...]


class KVTransfer:
    """Gives and takes blocks of an engine. engine: a digest, without which nothing is taken. executor: whose cache is
    in host memory. folder: where files lie that every engine process of a user on this host sees."""

    def __init__(self, engine: bytes, executor: KVExecutor, folder: Path) -> None:
        self._engine, self._executor, self._folder = engine, executor, folder

    @classmethod
    def of(cls, llm: LLM) -> KVTransfer | None:
        """For a loaded engine; None where its cache is out of reach."""
        executor = llm.executor
        if not isinstance(executor, KVExecutor) or not executor.kv_in_reach:
            return None
        memory = Path("/dev/shm")
        return cls(digest_of(llm.manifest), executor, memory if memory.is_dir() else Path(tempfile.gettempdir()))

    def give(self, kv: KVCache, submit: Submit) -> KVGiven | None:
        """Put the cached beginning of a prompt where another engine can take it; None where there is none, or no room
        for it."""
        sequence = _sequence(submit)
        length = 0 if sequence is None else kv.cached_length(sequence)
        blocks = None if sequence is None or not length else kv.found(sequence, length)
        if blocks is None:
            return None
        header = _Header(self._engine, tuple(map(tuple, blocks)), submit.prompt[:length])
        name = f"icc-kv-{secrets.token_hex(16)}"
        views = [view for group, held in enumerate(blocks) for n in held for view in self._views(group, held[n])]
        try:
            self._write(self._folder / name, msgspec.msgpack.encode(header), views)
        except OSError as error:
            log.warning("the KV of a prompt is not given: %s", error.strerror)
            return None
        return KVGiven(submit.id, name, length, sum(map(len, blocks)))

    def take(self, kv: KVCache, submit: Submit) -> int:
        """Take what another engine has given of the beginning of a prompt into the prefix cache; how many tokens that
        is. What cannot be taken is computed: 0."""
        sequence, path = _sequence(submit), self._folder / submit.takes_kv
        if sequence is None or not _NAME.fullmatch(submit.takes_kv):
            return 0
        try:
            with _mapped(path) as content:
                path.unlink(missing_ok=True)  # it is taken once
                return self._adopt(kv, sequence, content)
        except (OSError, ValueError, msgspec.DecodeError) as error:
            log.warning("the KV of a prompt cannot be taken: %s", error)
            return 0

    def sweep(self) -> None:
        """Remove what nobody has taken, and what ended processes have left."""
        for path in self._folder.glob("icc-kv-*"):
            try:
                found = path.lstat()
                if found.st_uid == os.geteuid() and time.time() - found.st_mtime > _KEPT_S:
                    path.unlink()
            except OSError:
                continue  # somebody has taken it

    def _adopt(self, kv: KVCache, sequence: CachedSequence, content: mmap.mmap) -> int:
        size = int.from_bytes(content[:8], "little")
        header = msgspec.msgpack.decode(content[8 : 8 + size], type=_Header)
        length = len(header.tokens)
        if header.engine != self._engine or length > kv.longest_prefix(sequence):
            raise ValueError("it is of another engine, or of a longer prompt")
        if list(header.tokens) != sequence.tokens[:length]:
            raise ValueError("it is of another prompt")
        if [tuple(group.numbers(length)) for group in kv.groups] != list(header.numbers):
            raise ValueError("it has other blocks")
        block = [sum(len(view) for view in self._views(group, 0)) for group in range(len(kv.groups))]
        if len(content) != 8 + size + sum(len(n) * each for n, each in zip(header.numbers, block, strict=True)):
            raise ValueError("it is cut")
        adopted = kv.adopt(sequence, length)
        if adopted is None:
            return 0  # no room now
        at = 8 + size
        for group, numbers in enumerate(header.numbers):
            for number in numbers:
                if number in adopted[group]:
                    self._read(content, at, self._views(group, adopted[group][number]))
                at += block[group]
        return length

    def _views(self, group: int, block: int) -> list[memoryview]:
        return self._executor.kv_views(group, block)

    @staticmethod
    def _read(content: mmap.mmap, at: int, views: Iterable[memoryview]) -> None:
        with memoryview(content) as source:
            for view in views:
                view[:] = source[at : at + len(view)]
                at += len(view)

    @staticmethod
    def _write(path: Path, header: bytes, views: list[memoryview]) -> None:
        """A whole file, or none."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            with open(descriptor, "wb", buffering=1 << 20) as stream:
                stream.write(len(header).to_bytes(8, "little") + header)
                for view in views:
                    stream.write(view)
        except OSError:
            path.unlink(missing_ok=True)
            raise


def digest_of(manifest: Manifest) -> bytes:
    """What computes the same KV, byte by byte, has the same: program, kernels and weights."""
    skipped = ("report.json", "canaries.json", "runtime/", "tokenizer/", "__main__.py")
    files = [(name, entry.sha256) for name, entry in sorted(manifest.files.items()) if not name.startswith(skipped)]
    return blake2b(msgspec.msgpack.encode(files), digest_size=32, person=b"icc-kv-engine").digest()


def _sequence(submit: Submit) -> CachedSequence | None:
    """A prompt as the prefix cache knows it; None where more than its tokens tells its KV from that of others."""
    if submit.adapter or submit.extras:
        return None
    return CachedSequence(tokens=list(submit.prompt), salt=submit.salt)


def _mapped(path: Path) -> mmap.mmap:
    """A file of this user's, in memory. OSError, or ValueError where it is something else."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_size < 8:
            raise ValueError("it is no file of this user's")
        return mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
    finally:
        os.close(descriptor)

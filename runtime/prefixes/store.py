"""PromptStore: keeps the KV of prompts in files of a directory, for later processes of the same engine.

A file is the size of its header (8 bytes, little-endian), the header (StoredPrompt, JSON), and the bytes of its blocks.
Its name is a hash of the identity and of the key of its last block, which depends on tokens and salt. A thread of the
store writes and reads the files, so that steps do not wait for them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import msgspec

log = logging.getLogger("icc.engine")
SUFFIX = ".kv"
_PARTIAL = ".partial"
_MAX_HEADER = 16 << 20  # bytes
_PIECE = 4 << 20  # bytes


class StoredPrompt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The header of a file: it holds the blocks of the first `length` tokens of a prompt. numbers: the indices of these
    blocks in each KV group. digest: of their bytes. seconds: how long the file is kept after its last use. identity,
    key: hex, see the module's docstring."""

    icc_prompt: int
    identity: str
    key: str
    length: int
    numbers: list[list[int]]
    nbytes: int
    digest: str
    seconds: float


@dataclass
class _StoredFile:
    length: int
    nbytes: int
    seconds: float


class PromptStore:
    """The files of one engine in a directory, which other engines may share. identity: see KVBlocks. most_bytes: limit
    for all files there; the least recently used are removed first. OSError if the directory cannot be made."""

    def __init__(self, folder: Path, identity: bytes, most_bytes: int) -> None:
        self._folder, self._identity, self._most = folder, identity.hex(), most_bytes
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._entries: dict[str, _StoredFile] = {}
        self._lock = threading.Lock()
        self._asked: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._scan()
        threading.Thread(target=self._work, name="prompt store", daemon=True).start()

    def find(self, keys: Sequence[bytes]) -> int | None:
        """The index of the last key under which a prompt is stored; None if there is none. keys: of consecutive
        blocks."""
        with self._lock:
            return next((n for n in range(len(keys) - 1, -1, -1) if self._name(keys[n]) in self._entries), None)

    def save(
        self, key: bytes, length: int, numbers: list[list[int]], views: Sequence[memoryview], seconds: float,
        still_good: Callable[[], bool], done: Callable[[], None],
    ) -> None:  # fmt: skip
        """Write blocks to a file. They must not change before `done` is called (by `finished`); the file is kept if
        `still_good` is True then."""
        header = StoredPrompt(1, self._identity, key.hex(), length, numbers, sum(map(len, views)), "", seconds)

        def work() -> None:
            path = self._folder / (self._name(key) + _PARTIAL)
            written: StoredPrompt | None = None
            try:
                written = _write(path, header, views)
            except OSError as error:
                log.warning("a prompt is not stored: %s", error.strerror)
            self._ended.put(lambda: end(path, written))

        def end(path: Path, written: StoredPrompt | None) -> None:
            done()
            if written is None or not still_good():
                _remove(path)
                return
            try:
                os.replace(path, path.with_name(self._name(key)))
            except OSError as error:
                log.warning("a prompt is not stored: %s", error.strerror)
                return
            with self._lock:
                self._entries[self._name(key)] = _StoredFile(length, written.nbytes, seconds)
            self._asked.put(self._make_room)

        self._asked.put(work)

    def read(self, key: bytes, done: Callable[[StoredPrompt | None, memoryview], None]) -> None:
        """Read a prompt; `done` is called by `finished`, with None if the file is damaged or gone."""
        name = self._name(key)

        def work() -> None:
            found: StoredPrompt | None = None
            content = memoryview(b"")
            try:
                found, content = _read(self._folder / name, self._identity, key.hex())
            except (OSError, ValueError, msgspec.DecodeError) as error:
                log.warning("%s is damaged, and removed: %s", self._folder / name, error)
                self._forget(name)
            with contextlib.suppress(OSError):  # a read-only directory can still be read
                os.utime(self._folder / name)
            self._ended.put(lambda: done(found, content))

        self._asked.put(work)

    def touch(self, key: bytes) -> None:
        """Record that a prompt was used."""
        name = self._name(key)

        def work() -> None:
            try:
                os.utime(self._folder / name)
            except OSError:
                with self._lock:
                    self._entries.pop(name, None)

        self._asked.put(work)

    def finished(self) -> bool:
        """Call the `done` functions that are due; True if there were any."""
        found = False
        while not self._ended.empty():
            self._ended.get()()
            found = True
        return found

    def sweep(self) -> None:
        """Remove expired files, in the store's thread."""
        self._asked.put(self._make_room)

    # -- in the store's thread ---------------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            try:
                self._asked.get()()
            except Exception as error:
                log.warning("the prompt store failed for one prompt: %s", error)

    def _name(self, key: bytes) -> str:
        return blake2b(key + bytes.fromhex(self._identity), digest_size=24).hexdigest() + SUFFIX

    def _scan(self) -> None:
        """Register the files of earlier processes; remove incomplete and foreign ones."""
        for path, facts in self._files(_PARTIAL):
            if time.time() - facts.st_mtime > 600:
                _remove(path)
        for path, facts in self._files(SUFFIX):
            try:
                with path.open("rb") as file:
                    found = _header(file.read(8), file.read)
                    whole = file.tell() + found.nbytes == facts.st_size
                if not whole:
                    raise ValueError("it is cut")
            except (OSError, ValueError, msgspec.DecodeError) as error:
                log.warning("%s is damaged, and removed: %s", path, error)
                _remove(path)
                continue
            if found.identity == self._identity:
                self._entries[path.name] = _StoredFile(found.length, found.nbytes, found.seconds)
        self._make_room()

    def _files(self, suffix: str) -> Iterator[tuple[Path, os.stat_result]]:
        """The plain files with this suffix; links, directories and pipes are left alone."""
        for path in self._folder.glob(f"*{suffix}"):
            with contextlib.suppress(OSError):
                facts = path.lstat()
                if stat.S_ISREG(facts.st_mode):
                    yield path, facts

    def _forget(self, name: str) -> None:
        with self._lock:
            self._entries.pop(name, None)
        _remove(self._folder / name)

    def _make_room(self) -> None:
        now, kept = time.time(), list[tuple[float, int, str]]()
        for path, facts in self._files(SUFFIX):
            entry = self._entries.get(path.name)
            if entry is not None and now - facts.st_mtime > entry.seconds:
                self._forget(path.name)
            else:
                kept.append((facts.st_mtime, facts.st_size, path.name))
        total = sum(size for _, size, _ in kept)
        for _, size, name in sorted(kept):
            if total <= self._most:
                break
            self._forget(name)
            total -= size


def _remove(path: Path) -> None:
    """Remove a file, which may be gone or in a read-only directory."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        log.warning("%s cannot be removed: %s", path, error.strerror)


def _write(path: Path, header: StoredPrompt, views: Sequence[memoryview]) -> StoredPrompt:
    """Write a file, its header last, with the digest of the written bytes. OSError if it fails; no file is left
    then."""
    whole = msgspec.structs.replace(header, digest="0" * 64)
    size = len(msgspec.json.encode(whole))
    digest = blake2b(digest_size=32)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    try:
        with open(os.open(path, flags, 0o600), "wb") as file:
            file.seek(8 + size)
            for view in views:
                copy = bytes(view)  # hash exactly the bytes that are written
                digest.update(copy)
                file.write(copy)
            whole = msgspec.structs.replace(header, digest=digest.hexdigest())
            file.seek(0)
            file.write(size.to_bytes(8, "little") + msgspec.json.encode(whole))
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        _remove(path)
        raise
    return whole


def _header(begin: bytes, read: Callable[[int], bytes]) -> StoredPrompt:
    size = int.from_bytes(begin, "little")
    if not 0 < size <= _MAX_HEADER:
        raise ValueError("it has no header")
    return msgspec.json.decode(read(size), type=StoredPrompt)


def _read(path: Path, identity: str, key: str) -> tuple[StoredPrompt, memoryview]:
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        found = _header(file.read(8), file.read)
        content = file.read()
    if found.identity != identity or found.key != key:
        raise ValueError("it is of another prompt")
    if len(content) != found.nbytes or blake2b(content, digest_size=32).hexdigest() != found.digest:
        raise ValueError("its digest is another")
    return found, memoryview(content)

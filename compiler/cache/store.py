"""The engines that icc compiled on its own, where a model was run or served instead of an engine: one directory each.

$XDG_CACHE_HOME/icc/engines/KEY/
  NAME.engine/    what `icc compile` writes
  entry.json      what it was made of; its time of change is when the engine was last used
  lock            held alone by who compiles or removes it, shared by who uses it
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from ..errors import WriteError
from ..places import user_cache

_ENTRY, _LOCK, _COMPILING = "entry.json", "lock", "compiling"


def cache_root() -> Path:
    """Where the engines are."""
    return user_cache() / "engines"


@dataclass(frozen=True)
class Facts:
    """entry.json. model: as it was asked for. source: the directory that it was compiled from. icc: the digest of the
    icc that did; version: its version. options: those that are not the default. created: seconds since 1970."""

    model: str
    source: str
    engine: str
    icc: str
    version: str
    options: dict[str, object]
    created: float


@dataclass(frozen=True)
class CacheEntry:
    """One engine of the cache. facts: None where a compile was killed before it ended. nbytes: of all its files.

    used: seconds since 1970 when it was last wanted."""

    path: Path
    facts: Facts | None
    nbytes: int
    used: float

    @property
    def key(self) -> str:
        """Its directory's name."""
        return self.path.name

    @property
    def age(self) -> float:
        """Seconds since it was last used."""
        return max(time.time() - self.used, 0.0)


class Cell:
    """The place of one engine, and a lock on it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock: IO[str] = (path / _LOCK).open("a")
        except OSError as error:
            raise WriteError(
                f"cannot write into the cache {path.parent}: {error.strerror}", "set XDG_CACHE_HOME to another place"
            ) from error

    def share(self) -> None:
        """Lock it against removal; waits while another process removes it."""
        fcntl.flock(self._lock, fcntl.LOCK_SH)

    def take(self) -> bool:
        """Lock it against all others if it is not locked; whether it was locked now."""
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """A block that one process at a time enters; the others wait."""
        with (self.path / _COMPILING).open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    @property
    def is_here(self) -> bool:
        """Whether the lock that is held is that of the directory that is there: another may have removed it."""
        try:
            return os.path.samestat(os.fstat(self._lock.fileno()), os.stat(self.path / _LOCK))
        except FileNotFoundError:
            return False

    def engine(self) -> Path | None:
        """The engine; None if it is not complete."""
        facts = _read(self.path)
        return None if facts is None else self.path / facts.engine

    def write(self, facts: Facts) -> None:
        """Say what the engine was made of, which makes it complete."""
        partial = self.path / f"{_ENTRY}.partial"
        partial.write_text(json.dumps(asdict(facts), indent=1) + "\n")
        os.replace(partial, self.path / _ENTRY)

    def touch(self) -> None:
        """The engine is used now."""
        with contextlib.suppress(OSError):
            os.utime(self.path / _ENTRY)

    def close(self) -> None:
        """Let go of the lock."""
        self._lock.close()


def open_cell(key: str) -> Cell:
    """The place of a key, which stays there until it is closed."""
    while True:
        cell = Cell(cache_root() / key)
        cell.share()
        if cell.is_here:
            return cell
        cell.close()


def entries() -> list[CacheEntry]:
    """Everything in the cache, last used first."""
    root = cache_root()
    found = [_entry(path) for path in root.iterdir() if path.is_dir()] if root.is_dir() else []
    return sorted(found, key=lambda entry: -entry.used)


def remove(found: Sequence[CacheEntry], dry: bool = False) -> Iterator[tuple[CacheEntry, bool]]:
    """Remove entries one after the other; each with whether it was, or is in use and stays. dry: nothing is removed."""
    for entry in found:
        with contextlib.closing(Cell(entry.path)) as cell:
            free = cell.take()
            if free and not dry:
                (entry.path / _ENTRY).unlink(missing_ok=True)  # from here on it is not complete, whatever happens
                shutil.rmtree(entry.path, ignore_errors=True)
        yield entry, free


def _entry(path: Path) -> CacheEntry:
    nbytes = 0
    for folder, _, files in os.walk(path):
        for name in files:
            with contextlib.suppress(OSError):
                nbytes += os.lstat(os.path.join(folder, name)).st_size
    marked = path / _ENTRY if (path / _ENTRY).is_file() else path
    return CacheEntry(path, _read(path), nbytes, marked.stat().st_mtime)


def _read(path: Path) -> Facts | None:
    try:
        facts = Facts(**json.loads((path / _ENTRY).read_text()))
    except (OSError, ValueError, TypeError):
        return None
    return facts if (path / facts.engine / "engine.json").is_file() else None

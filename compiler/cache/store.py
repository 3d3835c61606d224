"""The cache of engines that icc compiled because a model was run or served. Each engine has one directory:

$XDG_CACHE_HOME/icc/engines/KEY/
  NAME.engine/    what `icc compile` writes
  entry.json      what it was compiled from; its mtime is when the engine was last used
  lock            exclusive while a process compiles or removes the engine, shared while one uses it
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
    """The directory of all cached engines."""
    return user_cache() / "engines"


@dataclass(frozen=True)
class Facts:
    """entry.json. model: as the user named it. source: the directory that it was compiled from. engine: the name of its
    directory. icc: the digest of icc's own code; version: its version. options: those that differ from their defaults.
    created: seconds since 1970."""

    model: str
    source: str
    engine: str
    icc: str
    version: str
    options: dict[str, object]
    created: float


@dataclass(frozen=True)
class CacheEntry:
    """One engine of the cache. facts: None if its compile was killed. nbytes: the size of all its files.

    used: when it was last used, in seconds since 1970."""

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
    """The directory of one engine in the cache, and a lock on it."""

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
        """Take an exclusive lock without waiting. False if another process has a lock."""
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """A context that one process at a time enters; other processes wait."""
        with (self.path / _COMPILING).open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    @property
    def is_here(self) -> bool:
        """Whether the open lock file is still the one in the directory: another process may have removed the
        directory."""
        try:
            return os.path.samestat(os.fstat(self._lock.fileno()), os.stat(self.path / _LOCK))
        except FileNotFoundError:
            return False

    def engine(self) -> Path | None:
        """The engine's directory; None if the engine is not complete."""
        facts = _read(self.path)
        return None if facts is None else self.path / facts.engine

    def write(self, facts: Facts) -> None:
        """Write entry.json, which marks the engine as complete."""
        partial = self.path / f"{_ENTRY}.partial"
        partial.write_text(json.dumps(asdict(facts), indent=1) + "\n")
        os.replace(partial, self.path / _ENTRY)

    def touch(self) -> None:
        """Set the time of last use to now."""
        with contextlib.suppress(OSError):
            os.utime(self.path / _ENTRY)

    def close(self) -> None:
        """Release the lock."""
        self._lock.close()


def open_cell(key: str) -> Cell:
    """The cell of a key, locked so that nobody removes it before it is closed."""
    while True:
        cell = Cell(cache_root() / key)
        cell.share()
        if cell.is_here:
            return cell
        cell.close()


def entries() -> list[CacheEntry]:
    """All engines in the cache, the most recently used first."""
    root = cache_root()
    found = [_entry(path) for path in root.iterdir() if path.is_dir()] if root.is_dir() else []
    return sorted(found, key=lambda entry: -entry.used)


def remove(found: Sequence[CacheEntry], dry: bool = False) -> Iterator[tuple[CacheEntry, bool]]:
    """Remove entries one after the other. Yields each with whether it was free: an entry in use stays. dry: remove
    nothing."""
    for entry in found:
        with contextlib.closing(Cell(entry.path)) as cell:
            free = cell.take()
            if free and not dry:
                (entry.path / _ENTRY).unlink(missing_ok=True)  # from here on it is incomplete, whatever happens
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

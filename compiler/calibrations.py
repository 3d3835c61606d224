"""Keeps the results of a compile's calibration on disk until it succeeds, so that an interrupted compile can resume.

$XDG_CACHE_HOME/icc/calibrations/KEY/
  PASS/    the files that passes/quantize/store.py writes
  lock     held by the compile that uses the folder; another one at the same time keeps nothing
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from .identity import checkpoint_files, sources_digest, stated
from .options import CompileOptions
from .places import user_cache

_KEPT: ContextVar[set[Path] | None] = ContextVar("kept", default=None)  # folders; see `kept_between_targets`


@dataclass
class Calibrations:
    """The folder of a compile's calibration, or None if it keeps nothing."""

    folder: Path | None = None
    lock: IO[str] | None = None

    def done(self) -> None:
        """Remove the folder of a compile that has succeeded, unless the next target needs it."""
        kept = _KEPT.get()
        if self.folder is not None and kept is not None:
            kept.add(self.folder)
        elif self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
        if self.lock is not None:
            self.lock.close()


@contextlib.contextmanager
def kept_between_targets() -> Iterator[None]:
    """Within the block, keep the results of one compile for the next; remove them if the block ends without an
    error."""
    token = _KEPT.set(set())
    try:
        yield
        for folder in _KEPT.get() or ():
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        _KEPT.reset(token)


def open_calibrations(options: CompileOptions, sequences: Sequence[Sequence[int]]) -> Calibrations:
    """The folder for the results of these options and this text on this checkpoint, named by a hash of their
    content."""
    facts = {
        "icc": sources_digest(),
        "options": stated(options, "calibration"),
        "files": checkpoint_files(options.model),
        "text": [list(ids) for ids in sequences],
    }
    folder = calibrations_root() / hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    lock: IO[str] | None = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("a")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # the folder is in use, or cannot be made
        if lock is not None:
            lock.close()
        return Calibrations()
    return Calibrations(folder, lock)


def calibrations_root() -> Path:
    """The directory that holds the folders."""
    return user_cache() / "calibrations"


def prune() -> int:
    """Remove the folders of interrupted compiles, except those in use; returns how many were removed."""
    root, removed = calibrations_root(), 0
    for folder in sorted(root.iterdir()) if root.is_dir() else ():
        with contextlib.suppress(OSError), (folder / "lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
            removed += 1
    return removed

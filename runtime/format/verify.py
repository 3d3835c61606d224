"""Verification: the files of an engine directory are exactly those that the manifest lists. See also `files.py`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from ..errors import EngineFormatError
from .manifest import MAIN, FileEntry, Manifest
from .present import MANIFEST_FILE

_NO_PARTS = frozenset(("", ".", ".."))  # of a path that stays below
_HINT = "copy the engine again from where it was made, or compile the model again"


def check_paths(manifest: Manifest) -> None:
    """EngineFormatError unless every path in the manifest stays inside the engine and is listed under `files`."""
    for path in manifest.files:
        _check_relative(path)
    if MAIN not in manifest.programs:
        raise EngineFormatError(f"{MANIFEST_FILE}: there is no program {MAIN!r}", _HINT)
    named: list[str] = []
    for entry in manifest.programs.values():
        named += [entry.weights, entry.program, *(library.path for library in entry.libraries)]
    if manifest.base is not None:
        named.append(manifest.base.weights)
    if manifest.canaries_file is not None:
        named.append(manifest.canaries_file)
    for path in named:
        if path not in manifest.files:
            raise EngineFormatError(f"{MANIFEST_FILE}: {path!r} is used but not listed under files", _HINT)
    if manifest.tokenizer_dir is not None:
        _check_relative(manifest.tokenizer_dir)


def _check_relative(path: str) -> None:
    if not _NO_PARTS.isdisjoint(path.split("/")) or "\0" in path or "\\" in path:
        raise EngineFormatError(f"{MANIFEST_FILE}: path {path!r} does not stay inside the engine directory", _HINT)


def check_listing(root: Path, manifest: Manifest) -> None:
    """EngineFormatError for a file that is missing, not listed, of another size, or no plain file (links included).

    What Python puts into its own `__pycache__` folders is the one thing that may come after the engine was written.
    Other files in the base of a delta engine do not matter to the delta.
    """
    files = manifest.files
    if manifest.base is not None:
        shared = {*manifest.base.shared}
        _check_shared(Path(manifest.base.path), {name: files[name] for name in shared})
        files = {name: entry for name, entry in files.items() if name not in shared}
    found: dict[str, int] = {}
    folders = [("", False)]  # below the root, with the slash behind; whether it is a __pycache__
    while folders:
        below, own = folders.pop()
        for entry in _entries(root / below):
            path = below + entry.name
            if entry.is_dir(follow_symlinks=False):
                folders.append((f"{path}/", entry.name == "__pycache__"))
            elif not own or path in files:
                if not entry.is_file(follow_symlinks=False):
                    raise EngineFormatError(f"{path} is not a plain file", _HINT)
                found[path] = entry.stat(follow_symlinks=False).st_size
    found.pop(MANIFEST_FILE, None)
    for path, entry in files.items():
        if path not in found:
            raise EngineFormatError(f"{path} is missing", _HINT)
        if found[path] != entry.size:
            raise EngineFormatError(f"{path} has {found[path]} bytes, {MANIFEST_FILE} says {entry.size}", _HINT)
    extra = sorted(found.keys() - files.keys())
    if extra:
        raise EngineFormatError(f"{extra[0]} is not part of the engine", f"remove it, or {_HINT}")


def _check_shared(root: Path, files: Mapping[str, FileEntry]) -> None:
    for path, entry in files.items():
        place = root / path
        if place.is_symlink() or not place.is_file():
            raise EngineFormatError(f"{place} is missing", _HINT)
        if (size := place.stat().st_size) != entry.size:
            raise EngineFormatError(f"{place} has {size} bytes, {MANIFEST_FILE} says {entry.size}", _HINT)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """What is in a folder; nothing in one that cannot be read, so that its files are missing."""
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []

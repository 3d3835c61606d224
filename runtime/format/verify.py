"""Verification: the files of an engine are exactly those that the manifest lists. See also `files.py`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ..errors import EngineFormatError
from .container import NO_FILE, Container
from .manifest import MAIN, FileEntry, Manifest
from .open_container import open_container
from .paths import check_relative
from .present import BESIDE, MANIFEST_FILE

_HINT = "copy the engine again from where it was made, or compile the model again"


def check_paths(manifest: Manifest) -> None:
    """Raise EngineFormatError unless every path in the manifest stays inside the engine and is listed under `files`."""
    for path in manifest.files:
        check_relative(path)
    if MAIN not in manifest.programs:
        raise EngineFormatError(f"{MANIFEST_FILE}: there is no program {MAIN!r}", _HINT)
    named: list[str] = []
    for entry in manifest.programs.values():
        named += [entry.program, *(library.path for library in entry.libraries)]
    named += sorted(manifest.all_weights)
    if manifest.canaries_file is not None:
        named.append(manifest.canaries_file)
    for path in named:
        if path not in manifest.files:
            raise EngineFormatError(f"{MANIFEST_FILE}: {path!r} is used but not listed under files", _HINT)
    if manifest.tokenizer_dir is not None:
        check_relative(manifest.tokenizer_dir)


def check_listing(container: Container, manifest: Manifest) -> None:
    """Raise EngineFormatError for a file that is missing, not listed, of another size, or no plain file (such as a
    link).

    Only files in Python's own `__pycache__` folders may be added after the engine was written. Unlisted files in the
    base of a delta engine are ignored.
    """
    files = manifest.files
    if manifest.base is not None:
        shared = {*manifest.base.shared}
        _check_shared(Path(manifest.base.path), {name: files[name] for name in shared})
        files = {name: entry for name, entry in files.items() if name not in shared}
    found = container.sizes()
    for name in (MANIFEST_FILE, *BESIDE):
        found.pop(name, None)
    for path, entry in files.items():
        size = found.pop(path, None)
        if size is None:
            raise EngineFormatError(f"{path} is missing", _HINT)
        _check_plain(path, size)
        if size != entry.size:
            raise EngineFormatError(f"{path} has {size} bytes, {MANIFEST_FILE} says {entry.size}", _HINT)
    for path in sorted(found):
        if path.split("/")[-2:-1] != ["__pycache__"]:
            _check_plain(path, found[path])
            raise EngineFormatError(f"{path} is not part of the engine", f"remove it, or {_HINT}")


def _check_plain(path: str, size: int) -> None:
    if size == NO_FILE:
        raise EngineFormatError(f"{path} is not a plain file", _HINT)


def _check_shared(root: Path, files: Mapping[str, FileEntry]) -> None:
    sizes = open_container(root).sizes()
    for path, entry in files.items():
        size = sizes.get(path, NO_FILE)
        if size == NO_FILE:
            raise EngineFormatError(f"{root / path} is missing", _HINT)
        if size != entry.size:
            raise EngineFormatError(f"{root / path} has {size} bytes, {MANIFEST_FILE} says {entry.size}", _HINT)

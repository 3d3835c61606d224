"""Whether an engine may be written where it is asked for."""

from __future__ import annotations

from pathlib import Path

from ..errors import OutputExistsError, WriteError


def check_output(path: Path, force: bool) -> None:
    """Refuse an output path that exists, unless --force; checked before anything is computed."""
    if path.exists() and not force:
        raise OutputExistsError(f"{path} exists", "give --force to replace it, or another path with -o")
    if path.exists() and not (path / "engine.json").is_file():
        raise OutputExistsError(f"{path} exists and is not an engine, so --force does not replace it", "remove it")
    if not path.resolve().parent.is_dir():
        raise WriteError(f"{path.resolve().parent} is not a directory", "create it first")

"""Whether there is an engine at a path at all; imports nothing heavy, so that a wrong path is answered at once."""

from __future__ import annotations

from pathlib import Path

from ..errors import EngineFormatError

MANIFEST_FILE = "engine.json"


def check_present(root: Path) -> Path:
    """The engine's manifest, not read. EngineFormatError if there is none."""
    if not root.is_dir():
        found = "is not a directory" if root.exists() else "does not exist"
        raise EngineFormatError(f"{root} {found}", "give the engine directory that `icc compile` wrote")
    file = root / MANIFEST_FILE
    if not file.is_file():
        checkpoint = (root / "config.json").is_file()
        hint = "this looks like a checkpoint: `icc compile` it first" if checkpoint else "give what `icc compile` wrote"
        raise EngineFormatError(f"{root} is not an engine: it has no {MANIFEST_FILE}", hint)
    return file

"""Opens the container of an engine: a directory, one file, or one target of either."""

from __future__ import annotations

from pathlib import Path

from .container import Container
from .folder import Folder
from .present import is_engine


def open_container(path: Path) -> Container:
    """Open the container of an engine, or of one target of an engine. EngineFormatError for a damaged file; of a
    directory it is only checked whether it is within an engine."""
    place = path.absolute()
    if is_engine(place.parent):
        from .targets import TargetFiles, targets_in

        whole = open_container(place.parent)
        if (targets := targets_in(whole)) is not None:
            return TargetFiles(whole, targets, place.name)
    if path.is_file():
        from .one_file import OneFile

        return OneFile(path)
    return Folder(path)

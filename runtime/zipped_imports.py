"""Imports from a one-file engine with the bytecode in its `__pycache__`, which zipimport does not find."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from typing import Any
from zipimport import zipimporter


class _Loader(SourceFileLoader):
    """Loads a module from the archive."""

    archive: zipimporter

    def get_data(self, path: str) -> bytes:
        """The content of a file of the archive."""
        return self.archive.get_data(path)

    def path_stats(self, path: str) -> dict[str, Any]:
        """A fixed time, which is not used: the bytecode contains a hash of the source (PEP 552)."""
        return {"mtime": 0}


class ZippedFinder:
    """Finds modules in the archive at `path`. OSError or ImportError if it is no archive."""

    def __init__(self, path: str) -> None:
        self._path, self._archive = path, zipimporter(path)

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        """The spec of a module; None if it is not in the archive."""
        place = f"{self._path}/{name.replace('.', '/')}"
        for file, inner in ((f"{place}/__init__.py", [place]), (f"{place}.py", None)):
            try:
                self._archive.get_data(file)
            except OSError:
                continue
            loader = _Loader(name, file)
            loader.archive = self._archive
            return spec_from_file_location(name, file, loader=loader, submodule_search_locations=inner)
        return None


def install(path: str) -> None:
    """Make the archive at `path` the first place to import from."""
    sys.meta_path.insert(0, ZippedFinder(path))  # type: ignore[arg-type]

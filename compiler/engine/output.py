"""Checks whether an output may be written at the requested path."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from ...runtime.format.present import is_engine
from ..errors import OutputExistsError, WriteError


def check_output(path: Path, force: bool, is_kind: Callable[[Path], bool] = is_engine, option: str = "-o") -> None:
    """Refuse an output path that cannot be written, or that exists, unless --force is given and it is of the kind that
    is written. Called before anything is computed."""
    if path.exists() and not force:
        raise OutputExistsError(f"{path} exists", f"give --force to replace it, or another path with {option}")
    if path.exists() and not is_kind(path):
        raise OutputExistsError(f"{path} exists and is not an engine, so --force does not replace it", "remove it")
    _check_parent(path, option)


def check_file(path: Path, force: bool) -> None:
    """Refuse a path for the file of `icc export` that cannot be written, or that exists, unless --force is given and it
    is a file."""
    if path.exists() and (not force or not path.is_file()):
        hint = "give --force to replace it, or another path" if path.is_file() else "give another path"
        raise OutputExistsError(f"{path} exists{'' if path.is_file() else ' and is no file'}", hint)
    _check_parent(path, "--onnx")


def _check_parent(path: Path, option: str) -> None:
    parent = path.resolve().parent
    if not parent.is_dir():
        raise WriteError(f"{parent} is not a directory", "create it first")
    if is_engine(parent):
        raise WriteError(f"{path} is within the engine {parent}", f"give another path with {option}")
    try:  # as `engine_output` will: permissions alone do not reveal a read-only or full file system
        os.rmdir(tempfile.mkdtemp(prefix=f".{path.name}.{os.getpid()}.", suffix=".partial", dir=parent))
    except OSError as error:
        raise WriteError(f"cannot write into {parent}: {error.strerror}", f"give another path with {option}") from error

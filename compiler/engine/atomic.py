"""Writes outputs atomically: into a temporary sibling, flushed to disk, then renamed.

A failed or killed compile leaves no incomplete engine and loses no earlier one.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ...runtime.format.folder import Folder
from ...runtime.format.present import ONE_FILE
from ..errors import WriteError
from ..interrupt import removed_if_interrupted
from .packing import write_one_file

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_PACKED = ".packed"  # within the temporary directory


@contextlib.contextmanager
def engine_output(path: Path) -> Iterator[Path]:
    """A temporary directory that becomes the engine at `path` if the block succeeds, and is deleted if it fails. The
    engine is one file if the path ends in ".icc", else a directory. WriteError if it cannot be written."""
    path = path.resolve()
    with _staged(path) as stage:
        yield stage
        if path.suffix == ONE_FILE:
            write_one_file(Folder(stage), stage / _PACKED)
            _finish_file(stage / _PACKED, path)
        else:
            _finish_directory(stage, path)


@contextlib.contextmanager
def directory(path: Path) -> Iterator[Path]:
    """A temporary directory that becomes the directory at `path` if the block succeeds. WriteError as for
    `engine_output`."""
    path = path.resolve()
    with _staged(path) as stage:
        yield stage
        _finish_directory(stage, path)


def _finish_directory(stage: Path, path: Path) -> None:
    stage.chmod(0o755)
    _sync_tree(stage)
    _replace(stage, path)


@contextlib.contextmanager
def engine_file(path: Path) -> Iterator[Path]:
    """A path that becomes the one-file engine at `path` if the block succeeds. WriteError as for `engine_output`."""
    path = path.resolve()
    with _staged(path) as stage:
        yield stage / _PACKED
        _finish_file(stage / _PACKED, path)


@contextlib.contextmanager
def written(path: Path) -> Iterator[Path]:
    """A path that becomes the plain file at `path` if the block succeeds. WriteError as for `engine_output`."""
    path = path.resolve()
    with _staged(path) as stage:
        yield stage / _PACKED
        _sync(stage / _PACKED)
        _replace(stage / _PACKED, path)


def _finish_file(file: Path, path: Path) -> None:
    file.chmod(0o755)
    _sync(file)
    _replace(file, path)


@contextlib.contextmanager
def _staged(path: Path) -> Iterator[Path]:
    with _write_errors(path):
        _remove_abandoned(path)
        stage = Path(tempfile.mkdtemp(prefix=f".{path.name}.{os.getpid()}.", suffix=".partial", dir=path.parent))
        with removed_if_interrupted(stage):  # again until it is gone: a second Ctrl-C may interrupt the removal
            try:
                yield stage
            finally:
                shutil.rmtree(stage, ignore_errors=True)


@contextlib.contextmanager
def _write_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reasons = {
            errno.ENOSPC: "the disk is full",
            errno.EDQUOT: "the disk quota is used up",
            errno.EFBIG: "a file would be larger than this process may write, or than the file system holds",
        }
        reason = reasons.get(error.errno or 0, error.strerror or str(error))
        there = next(folder for folder in path.parents if folder.is_dir())
        free = f"{shutil.disk_usage(there).free // 2**20} MiB are free on that disk"
        hint = "raise the limit on the size of files: ulimit -f" if error.errno == errno.EFBIG else free
        raise WriteError(f"cannot write {path}: {reason}", f"{hint}; nothing was left behind") from error


def _remove_abandoned(path: Path) -> None:
    """Delete the temporary files of killed compiles of the same engine, whose processes no longer exist. An old engine
    that was moved away and not replaced is put back."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.*"):
        owner = left.name.removeprefix(f".{path.name}.").split(".")[0]
        if left.suffix not in (".partial", ".old") or not owner.isdigit() or Path("/proc", owner).exists():
            continue
        if left.suffix == ".old" and not path.exists():
            os.rename(left, path)
        else:
            _remove(left)


def _remove(path: Path) -> None:
    if path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def _sync_tree(root: Path) -> None:
    for folder, _, files in os.walk(root):
        for name in [*files, "."]:
            _sync(Path(folder, name))


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _replace(made: Path, path: Path) -> None:
    """Put a new directory or file at a path, in place of the existing one."""
    if path.exists() and _exchange(made, path):
        _remove(made)
    elif path.exists():
        old = path.with_name(f".{path.name}.{os.getpid()}.old")
        os.rename(path, old)
        try:
            os.rename(made, path)
        except OSError:
            os.rename(old, path)
            raise
        _remove(old)
    else:
        os.rename(made, path)
    _sync(path.parent)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two directories or files atomically, so that the path exists at every moment; False if the system cannot."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):  # an old kernel, or a file system that cannot swap
        return False
    raise OSError(code, os.strerror(code), str(second))

"""Signing engines: keys, and the file beside the manifest."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from ..runtime.format.container import Container
from ..runtime.format.load import verify_all
from ..runtime.format.open_container import open_container
from ..runtime.format.present import MANIFEST_FILE, SIGNATURE_FILE
from ..runtime.format.targets import TargetFiles
from ..runtime.trust.minisign import SecretKey
from .engine.atomic import engine_file, written
from .engine.packing import write_one_file
from .errors import OutputExistsError, UsageError


def make_keys(path: Path) -> SecretKey:
    """Make a new key: `path` gets the secret half, readable only by its owner, and `path`.pub the public one.
    OutputExistsError if either exists."""
    public = path.with_name(f"{path.name}.pub")
    for file in (path, public):
        if file.exists():
            raise OutputExistsError(f"{file} exists", "give another path: a key that is gone cannot be made again")
    key = SecretKey.new()
    with written(path) as file:
        file.write_text(key.text())
        file.chmod(0o600)
    with written(public) as file:
        file.write_text(key.public.text())
    return key


def read_secret_key(path: Path, password: Callable[[], bytes]) -> SecretKey:
    """Read a key of `make_keys` or `minisign -G`. UsageError if the file is not a key, or the password is wrong."""
    try:
        return SecretKey.parse(path.read_text(), password)
    except UsageError as error:
        raise UsageError(f"{path}: {error.message}", error.hint) from error
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error


def sign_engine(engine: Path, key: SecretKey) -> None:
    """Put a signature beside the manifest of each target, replacing an earlier one; all files are verified first.
    EngineFormatError or a subclass, WriteError; UsageError for an engine that is too old to be sealed."""
    signatures: dict[str, bytes] = {}
    for container, manifest in verify_all(engine):
        if not manifest.digest:
            raise UsageError(f"{engine} is of an old icc, and not sealed", "compile the model again")
        signature = key.sign(container.read(MANIFEST_FILE), MANIFEST_FILE).encode()
        signatures[os.path.relpath(container.path / SIGNATURE_FILE, engine.absolute())] = signature
    put_beside(open_container(engine), signatures)


def put_beside(container: Container, files: Mapping[str, bytes]) -> None:
    """Add files that the manifest does not list to an engine: a directory gets them, a one-file engine is rewritten."""
    if isinstance(container, TargetFiles):
        return put_beside(container.whole, {f"{container.target}/{name}": content for name, content in files.items()})
    if container.path.is_dir():
        for name, content in files.items():
            with written(container.path / name) as file:
                file.write_bytes(content)
    else:
        with engine_file(container.path) as file:
            write_one_file(container, file, files)

"""Checks whether a path is an engine; imports nothing heavy, so that a wrong path is reported at once."""

from __future__ import annotations

from pathlib import Path

from ..errors import EngineFormatError

MANIFEST_FILE = "engine.json"
SIGNATURE_FILE = f"{MANIFEST_FILE}.minisig"  # the signature, where `minisign -V -m engine.json` looks for it
SBOM_FILE, PROVENANCE_FILE = "sbom.cdx.json", "provenance.intoto.json"  # also beside the manifest
BESIDE = (SIGNATURE_FILE, SBOM_FILE, PROVENANCE_FILE)  # files that may be in an engine though no manifest lists them
ONE_FILE = ".icc"  # the suffix of one-file engines
SHEBANG = b"#!/usr/bin/env python3\n"  # the first bytes of a one-file engine, so that `./model.icc run` starts
ARCHIVE = b"PK\3\4"  # after them: the first entry of a zip archive


def is_one_file(path: Path) -> bool:
    """Whether a file begins as a one-file engine does; it may be truncated."""
    if not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            return file.read(len(SHEBANG + ARCHIVE)) == SHEBANG + ARCHIVE
    except OSError:
        return False


def is_engine(path: Path) -> bool:
    """Whether a path looks like an engine, or one target of an engine; the engine is not read."""
    return (path / MANIFEST_FILE).is_file() or is_one_file(path) or is_one_file(path.parent)


def engine_name(path: Path) -> str:
    """The display name of the engine at an absolute path, which may be that of one of its targets: the engine's file
    name without `.engine` or `.icc`."""
    path = path.parent if is_engine(path.parent) else path
    return path.name.removesuffix(".engine").removesuffix(ONE_FILE)


def check_present(root: Path) -> None:
    """Raise EngineFormatError if there is no engine at the path."""
    if is_engine(root):
        return
    if not root.is_dir():
        found = "is not a directory, nor a one-file engine" if root.exists() else "does not exist"
        raise EngineFormatError(f"{root} {found}", "give the engine that `icc compile` wrote")
    checkpoint = (root / "config.json").is_file()
    hint = "this looks like a checkpoint: `icc compile` it first" if checkpoint else "give what `icc compile` wrote"
    raise EngineFormatError(f"{root} is not an engine: it has no {MANIFEST_FILE}", hint)

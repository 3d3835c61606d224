"""An engine as an OCI image layout on disk: an artifact whose one layer is the engine as one file, for any registry.

Format: https://github.com/opencontainers/image-spec, version 1.1: image-layout.md, and manifest.md on artifacts and the
empty descriptor. Nothing in it depends on time or place.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...runtime.errors import EngineFormatError
from ...runtime.format.container import Container
from .packing import write_one_file

ARTIFACT = "application/vnd.icc.engine.v1"
LAYER = "application/vnd.icc.engine.v1+zip"
LAYOUT_FILE, INDEX_FILE = "oci-layout", "index.json"
_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_INDEX = "application/vnd.oci.image.index.v1+json"
_EMPTY = "application/vnd.oci.empty.v1+json"
_LAYOUT = {"imageLayoutVersion": "1.0.0"}
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_HINT = "copy the layout again from where it was made"


def is_layout(path: Path) -> bool:
    """Whether a directory is an OCI image layout."""
    return (path / LAYOUT_FILE).is_file()


def write_layout(container: Container, stage: Path, name: str, digest: str) -> None:
    """Write the engine in a container as a layout into a directory. name: the file that pulling it creates, by ORAS'
    convention. digest: that of its engine.json, written as an annotation."""
    blobs = stage / "blobs" / "sha256"
    blobs.mkdir(parents=True)
    write_one_file(container, blobs / "layer")
    layer = _named(blobs / "layer", LAYER) | {"annotations": {"org.opencontainers.image.title": name}}
    manifest = {
        "schemaVersion": 2,
        "mediaType": _MANIFEST,
        "artifactType": ARTIFACT,
        "config": _put(blobs, b"{}", _EMPTY),
        "layers": [layer],
        "annotations": {"icc.engine.digest": digest},
    }
    found = _put(blobs, _json(manifest), _MANIFEST) | {"artifactType": ARTIFACT}
    found["annotations"] = {"org.opencontainers.image.ref.name": "latest"}
    index = {"schemaVersion": 2, "mediaType": _INDEX, "manifests": [found]}
    (stage / INDEX_FILE).write_bytes(_json(index))
    (stage / LAYOUT_FILE).write_bytes(_json(_LAYOUT))


def engine_in(path: Path) -> Path:
    """The one-file engine in a layout, its bytes compared with their digest; a path that is no layout is returned.
    EngineFormatError if the layout is damaged or holds another artifact."""
    if not is_layout(path):
        return path
    index = _read(path, INDEX_FILE, (path / INDEX_FILE).read_bytes)
    for one in _descriptors(index, "manifests"):
        manifest = _read(path, one["digest"], lambda one=one: _blob(path, one).read_bytes())
        if manifest.get("artifactType") == ARTIFACT and len(layers := _descriptors(manifest, "layers")) == 1:
            return _blob(path, layers[0])
    raise EngineFormatError(f"{path} is an OCI layout without an engine of icc", "make one: icc pack ENGINE --oci DIR")


def _blob(path: Path, descriptor: dict[str, Any]) -> Path:
    """The file of a descriptor, checked to have the descriptor's size and digest."""
    file = path / "blobs" / "sha256" / descriptor["digest"].partition(":")[2]
    try:
        with file.open("rb") as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
    except OSError as error:
        raise EngineFormatError(f"{file} cannot be read: {error.strerror}", _HINT) from error
    if digest != file.name or file.stat().st_size != descriptor["size"]:
        raise EngineFormatError(f"{file} has changed: its name is not its sha256", _HINT)
    return file


def _descriptors(found: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """The descriptors of a list in an untrusted document, validated."""
    listed = found.get(name)
    return [one for one in listed if _is_descriptor(one)] if isinstance(listed, list) else []


def _is_descriptor(value: Any) -> bool:
    return isinstance(value, dict) and bool(_DIGEST.fullmatch(str(value.get("digest")))) and "size" in value


def _read(path: Path, name: str, read: Callable[[], bytes]) -> dict[str, Any]:
    try:
        found = json.loads(read())
    except (OSError, ValueError, RecursionError) as error:
        raise EngineFormatError(f"{path}: {name} cannot be read: {error}", _HINT) from error
    if not isinstance(found, dict):
        raise EngineFormatError(f"{path}: {name} is no JSON object", _HINT)
    return found


def _put(blobs: Path, content: bytes, kind: str) -> dict[str, Any]:
    (blobs / "new").write_bytes(content)
    return _named(blobs / "new", kind)


def _named(file: Path, kind: str) -> dict[str, Any]:
    """The descriptor of a blob, whose file is renamed to its digest."""
    with file.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    size = file.stat().st_size
    os.replace(file, file.with_name(digest))
    return {"mediaType": kind, "digest": f"sha256:{digest}", "size": size}


def _json(value: object) -> bytes:
    return json.dumps(value, indent=1, sort_keys=True).encode() + b"\n"

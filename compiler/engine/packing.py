"""Engines as one file, an uncompressed zip archive that Python runs, and back as directories.

Mapped files begin at page boundaries: the padding before each is an extra field of its entry, as in Android's zipalign.
Times, modes and order are fixed, so that equal engines give equal files.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from struct import pack

from ...runtime.format.container import Container
from ...runtime.format.load import own_files, read_manifest
from ...runtime.format.present import BESIDE, MANIFEST_FILE, SHEBANG
from ...runtime.format.targets import targets_in

Content = bytes | memoryview
PAGE = 4096  # bytes
_LARGE = 1 << 20  # bytes; smaller files are copied at once
_PIECE = 4 << 20  # bytes that are copied at once
_HEADER, _SIZES64 = 30, 20  # bytes of the header of an entry, and of its Zip64 field
_ALIGNING, _FIELD = 0xD935, 6  # the id of zipalign's extra field, and its least size
_UNIX, _MODE = 3, 0o100644 << 16
_ZIP64 = 0xFFFFFFFF  # bytes; from here on Python before 3.13 does not run an archive


def write_one_file(container: Container, target: Path, beside: Mapping[str, bytes] | None = None) -> None:
    """Write the engine in a container to one file. beside: contents by name of files that no manifest lists, added or
    replaced; None adds nothing. EngineFormatError if the engine is damaged; contents are not compared with their
    digests."""
    mapped = _mapped(container)
    with target.open("w+b") as file:
        file.write(SHEBANG)
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, strict_timestamps=True) as archive:
            added = beside or {}
            names = {*_names(container), *added}
            for name in sorted(names, key=lambda name: (name in mapped, name != MANIFEST_FILE, name)):
                content = added.get(name) or _content(container, name)
                _add(archive, file.tell(), name, content, name in mapped)


def needs_late_python(path: Path) -> bool:
    """Whether a one-file engine is so large that only Python 3.13 and later run it; icc itself opens any size."""
    return path.stat().st_size > _ZIP64


def write_directory(container: Container, stage: Path) -> None:
    """Write the engine in a container to an existing directory."""
    for name in _names(container):
        (stage / name).parent.mkdir(parents=True, exist_ok=True)
        with (stage / name).open("wb") as file:
            for piece in _pieces(_content(container, name)):
                file.write(piece)


def _names(container: Container) -> list[str]:
    """The names of the files that belong to the engine."""
    there = container.sizes()
    if (targets := targets_in(container)) is not None:
        return [MANIFEST_FILE, *sorted(targets.places() & there.keys())]
    own = own_files(read_manifest(container.path))
    return [MANIFEST_FILE, *own, *(name for name in BESIDE if name in there)]


def _mapped(container: Container) -> set[str]:
    """The names of the weights files, which are mapped."""
    if (targets := targets_in(container)) is None:
        return read_manifest(container.path).all_weights
    return {
        entry.files[name]
        for target, entry in targets.targets.items()
        for name in read_manifest(container.path / target).all_weights
    }


def _add(archive: zipfile.ZipFile, at: int, name: str, content: Content, aligned: bool) -> None:
    """Add a file to the archive. at: the offset of its header, in bytes."""
    info = zipfile.ZipInfo(name)
    info.create_system, info.external_attr, info.file_size = _UNIX, _MODE, len(content)
    large = info.file_size > zipfile.ZIP64_LIMIT // 2
    if aligned:
        room = -(at + _HEADER + len(name.encode()) + _FIELD + large * _SIZES64) % PAGE
        info.extra = pack("<HHH", _ALIGNING, 2 + room, PAGE) + bytes(room)
    with archive.open(info, "w", force_zip64=large) as entry:
        for piece in _pieces(content):
            entry.write(piece)
    info.extra = b""  # the archive's central directory does not need the padding


def _content(container: Container, name: str) -> Content:
    return container.map(name) if container.size(name) >= _LARGE else container.read(name)


def _pieces(content: Content) -> Iterator[Content]:
    for at in range(0, len(content), _PIECE):
        yield content[at : at + _PIECE]

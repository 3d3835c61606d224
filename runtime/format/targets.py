"""An engine of several targets: one engine per target, of which what is equal is stored once.

Its engine.json lists the targets and where their files lie. ENGINE/TARGET is the path of one of them, in a directory
and in one file: whoever opens that has an engine like any other, with a manifest, a program and files of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec

from ..errors import EngineFormatError, EngineVersionError
from .decoding import COPY_AGAIN, decode
from .digest import check_seal
from .manifest import FORMAT_VERSION, READ_VERSIONS
from .paths import check_relative
from .present import BESIDE, MANIFEST_FILE

if TYPE_CHECKING:
    from .container import Container


class TargetEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One target: the digest of its engine.json, and where in the whole each of its files lies, by the names that its
    manifest has."""

    digest: str
    files: dict[str, str]


class Targets(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """engine.json of an engine of several targets, which are in the order that they were compiled in."""

    format_version: int
    icc_version: str
    targets: dict[str, TargetEntry]
    digest: str = ""  # seals this file itself

    def places(self) -> set[str]:
        """Where the files of all targets lie, and where those may that no manifest lists."""
        found = {f"{target}/{name}" for target in self.targets for name in (MANIFEST_FILE, *BESIDE)}
        return found.union(*(entry.files.values() for entry in self.targets.values()))


class TargetFiles:
    """The container of one target, within that of the whole. EngineFormatError if there is no such target."""

    def __init__(self, whole: Container, targets: Targets, target: str) -> None:
        if target not in targets.targets:
            raise EngineFormatError(f"{whole.path} has no target {target!r}", f"it has: {', '.join(targets.targets)}")
        self.path, self.whole, self.target = whole.path / target, whole, target
        self._places = {name: f"{target}/{name}" for name in (MANIFEST_FILE, *BESIDE)}
        self._places |= targets.targets[target].files
        self._known = targets.places() | {MANIFEST_FILE}

    @property
    def modified(self) -> float:
        """When the whole was written."""
        return self.whole.modified

    def sizes(self) -> dict[str, int]:
        """Bytes of the target's files, by the target's names for them; files of no target are included."""
        there = self.whole.sizes()
        unknown = {place: size for place, size in there.items() if place not in self._known}
        return unknown | {name: there[place] for name, place in self._places.items() if place in there}

    def size(self, name: str) -> int:
        """Bytes of a file."""
        return self.whole.size(self._place(name))

    def read(self, name: str) -> bytes:
        """The content of a file."""
        return self.whole.read(self._place(name))

    def map(self, name: str) -> memoryview:
        """A file, mapped."""
        return self.whole.map(self._place(name))

    @contextmanager
    def reading(self) -> Iterator[Callable[[str], bytes]]:
        """`read`, as the whole does it for many."""
        with self.whole.reading() as read:
            yield lambda name: read(self._place(name))

    def _place(self, name: str) -> str:
        if name not in self._places:
            raise EngineFormatError(f"{name} is missing in {self.path}", COPY_AGAIN)
        return self._places[name]


def targets_in(container: Container) -> Targets | None:
    """What an engine of several targets says of them; None of one of one. EngineFormatError where it is damaged."""
    raw = container.read(MANIFEST_FILE)
    facts = decode(raw, MANIFEST_FILE, dict[str, msgspec.Raw])
    if "targets" not in facts:
        return None
    version = decode(bytes(facts.get("format_version", b"null")), MANIFEST_FILE, object)
    if version != FORMAT_VERSION:
        raise EngineVersionError(version, READ_VERSIONS)
    found = decode(raw, MANIFEST_FILE, Targets)
    check_seal(raw, found.digest)
    _check_names(found)
    return found


def _check_names(found: Targets) -> None:
    for target, entry in found.targets.items():
        if "/" in target or not entry.files:
            raise EngineFormatError(f"{MANIFEST_FILE}: {target!r} is no target", COPY_AGAIN)
        for path in (target, *entry.files, *entry.files.values()):
            check_relative(path)

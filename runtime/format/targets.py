"""An engine with several targets: one engine per target; files that are equal are stored once.

Its engine.json lists the targets and the places of their files. ENGINE/TARGET is the path of one target, in a directory
and in one file; it can be opened like any other engine, with its own manifest, program and files.
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
    """One target: the digest of its engine.json, and the path within the whole of each of its files, by the name in its
    manifest."""

    digest: str
    files: dict[str, str]


class Targets(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """engine.json of an engine with several targets, in the order in which they were compiled."""

    format_version: int
    icc_version: str
    targets: dict[str, TargetEntry]
    digest: str = ""  # seals this file itself

    def places(self) -> set[str]:
        """The paths of the files of all targets, and of files that are allowed though no manifest lists them."""
        found = {f"{target}/{name}" for target in self.targets for name in (MANIFEST_FILE, *BESIDE)}
        return found.union(*(entry.files.values() for entry in self.targets.values()))


class TargetFiles:
    """The container of one target, within the container of the whole engine. EngineFormatError if there is no such
    target."""

    def __init__(self, whole: Container, targets: Targets, target: str) -> None:
        if target not in targets.targets:
            raise EngineFormatError(f"{whole.path} has no target {target!r}", f"it has: {', '.join(targets.targets)}")
        self.path, self.whole, self.target = whole.path / target, whole, target
        self._places = {name: f"{target}/{name}" for name in (MANIFEST_FILE, *BESIDE)}
        self._places |= targets.targets[target].files
        self._known = targets.places() | {MANIFEST_FILE}

    @property
    def modified(self) -> float:
        """When the whole engine was written, in seconds since 1970."""
        return self.whole.modified

    def sizes(self) -> dict[str, int]:
        """The size in bytes of the target's files, by the target's names for them; files that belong to no target are
        included."""
        there = self.whole.sizes()
        unknown = {place: size for place, size in there.items() if place not in self._known}
        return unknown | {name: there[place] for name, place in self._places.items() if place in there}

    def size(self, name: str) -> int:
        """The size of a file in bytes."""
        return self.whole.size(self._place(name))

    def read(self, name: str) -> bytes:
        """The content of a file."""
        return self.whole.read(self._place(name))

    def map(self, name: str) -> memoryview:
        """A view of a mapped file."""
        return self.whole.map(self._place(name))

    @contextmanager
    def reading(self) -> Iterator[Callable[[str], bytes]]:
        """A context that gives the whole engine's cheaper `read`."""
        with self.whole.reading() as read:
            yield lambda name: read(self._place(name))

    def _place(self, name: str) -> str:
        if name not in self._places:
            raise EngineFormatError(f"{name} is missing in {self.path}", COPY_AGAIN)
        return self._places[name]


def targets_in(container: Container) -> Targets | None:
    """Read the targets of an engine; None if it has only one. EngineFormatError if it is damaged."""
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

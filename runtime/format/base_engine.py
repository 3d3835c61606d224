"""Delta engines: an engine that holds only the weights that differ from another engine, which holds all other files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from ..errors import EngineFormatError
from .manifest import BaseEngine, Manifest
from .present import MANIFEST_FILE, ONE_FILE, is_engine


def with_base(root: Path, manifest: Manifest, read: Callable[[Path], Manifest]) -> Manifest:
    """A delta engine's manifest, extended by the files that it takes from its base. The base is looked for where it was
    when the delta was written, and beside the delta, as a directory or as one file. read: reads an engine's manifest.
    EngineFormatError if the base is at none of these places."""
    base = manifest.base
    assert base is not None
    if "\0" in base.path or not Path(base.path).name:
        raise EngineFormatError(f"{MANIFEST_FILE}: base {base.path!r} is no path", "copy the engine again")
    here = root.resolve()
    known = (here / base.path, here.parent / Path(base.path).name)
    places = dict.fromkeys(path.resolve() for place in known for path in (place, _other_form(place)))
    others: list[str] = []
    for place in places:
        if not is_engine(place):
            continue
        found = read(place)
        if found.digest != base.digest or found.base is not None:
            others.append(f"; {place} is another")
        else:
            shared = {name: entry for name, entry in found.files.items() if name not in manifest.files}
            opened = BaseEngine(base.digest, str(place), base.weights, list(shared))
            return replace(manifest, files={**shared, **manifest.files}, base=opened)
    looked = " nor ".join(dict.fromkeys(str(place.resolve()) for place in known))
    raise EngineFormatError(
        f"{root} is a delta of another engine ({base.digest[:12]}), which is not at {looked}{''.join(others)}",
        f"put that engine beside it, as {Path(base.path).name}" + (", or compile the delta again" if others else ""),
    )


def _other_form(place: Path) -> Path:
    """The path of an engine directory as one file, or of one file as the directory that `icc unpack` makes of it."""
    if place.suffix == ONE_FILE:
        return place.with_suffix(".engine")
    return place.with_name(place.name.removesuffix(".engine") + ONE_FILE)

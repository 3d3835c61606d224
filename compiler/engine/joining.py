"""Joins engines of one model for several targets into one engine, which stores equal files and equal tensors once."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ... import __version__
from ...runtime.format.digest import encode_sealed, sealed
from ...runtime.format.folder import Folder
from ...runtime.format.load import read_manifest
from ...runtime.format.manifest import FORMAT_VERSION, PIECE, FileEntry, Manifest
from ...runtime.format.present import MANIFEST_FILE
from ...runtime.format.targets import TargetEntry, Targets
from ...runtime.format.weights import MappedWeights
from .digests import file_entry, library_digest
from .directory import weights_header

SHARED = "shared"  # the folder of weights that several targets share


@dataclass(frozen=True)
class WeightsFile:
    """A weights file of one of the engines: the target, and the file's name in that engine."""

    target: str
    name: str


def join_engines(engines: Mapping[str, Path], stage: Path) -> Targets:
    """Join engine directories, given by target, into one engine in the directory `stage`. Their files are moved."""
    manifests = {target: read_manifest(path) for target, path in engines.items()}
    manifests = _share_weights(engines, manifests, stage)
    places = _places(manifests)
    for target, path in engines.items():
        for name, place in places[target].items():
            if (path / name).is_file():  # gone if all its tensors are shared, or an equal file was moved
                (stage / place).parent.mkdir(parents=True, exist_ok=True)
                os.replace(path / name, stage / place)
    found: dict[str, TargetEntry] = {}
    for target, manifest in manifests.items():
        raw = encode_sealed(manifest)
        (stage / target).mkdir(exist_ok=True)
        (stage / target / MANIFEST_FILE).write_bytes(raw)
        found[target] = TargetEntry(msgspec.json.decode(raw)["digest"], places[target])
    whole = Targets(FORMAT_VERSION, __version__, found)
    (stage / MANIFEST_FILE).write_bytes(sealed(whole))
    return whole


def _places(manifests: Mapping[str, Manifest]) -> dict[str, dict[str, str]]:
    """The path of each target's files in the joined engine: their own names if all targets with a file of that name
    have the same content; else in the target's folder, or in that of the first target with this content."""
    contents: dict[str, set[str]] = {}
    for manifest in manifests.values():
        for name, entry in manifest.files.items():
            contents.setdefault(name, set()).add(entry.sha256)
    first: dict[str, str] = {}
    return {
        target: {
            name: name if len(contents[name]) == 1 else first.setdefault(entry.sha256, f"{target}/{name}")
            for name, entry in manifest.files.items()
        }
        for target, manifest in manifests.items()
    }


def _share_weights(engines: Mapping[str, Path], manifests: Mapping[str, Manifest], stage: Path) -> dict[str, Manifest]:
    """Move equal tensors from the engines' own files to shared files in `stage`, and return the new manifests."""
    opened = {
        WeightsFile(target, entry.weights): MappedWeights(Folder(engines[target]).map(entry.weights), entry.weights)
        for target, manifest in manifests.items()
        for entry in manifest.programs.values()
    }
    groups = _equal_tensors(opened)
    shared = _shared_names(groups)
    if groups:
        (stage / SHARED).mkdir()
    for holders, names in groups.items():
        _write_tensors(stage / shared[holders], opened[holders[0]], names)
    found: dict[str, Manifest] = {}
    for target, manifest in manifests.items():
        files, programs = dict(manifest.files), dict(manifest.programs)
        for name, entry in manifest.programs.items():
            own = WeightsFile(target, entry.weights)
            held = {shared[holders]: names for holders, names in groups.items() if own in holders}
            if not held:
                continue
            gone = {tensor for names in held.values() for tensor in names}
            path = engines[target] / entry.weights
            _write_tensors(path.with_suffix(".rest"), opened[own], [n for n in opened[own].sizes() if n not in gone])
            os.replace(path.with_suffix(".rest"), path)
            programs[name] = msgspec.structs.replace(entry, shared=list(held))
            files |= {file: _entry(stage / file, manifest, engines[target]) for file in held}
            files[entry.weights] = _entry(path, manifest, engines[target])
        found[target] = msgspec.structs.replace(manifest, files=files, programs=programs)
    for weights in opened.values():
        weights.close()
    return found


def _entry(path: Path, manifest: Manifest, engine: Path) -> FileEntry:
    """The manifest's entry for a file, with digests of pieces by the hash function of the engine's libraries."""
    is_large = path.stat().st_size > PIECE
    return file_entry(path, library_digest(engine, manifest.main.libraries) if is_large else None)


def _equal_tensors(opened: Mapping[WeightsFile, MappedWeights]) -> dict[tuple[WeightsFile, ...], list[str]]:
    """The names of tensors that are equal in several targets, by the files that hold them."""
    holders: dict[tuple[str, bytes], list[WeightsFile]] = {}
    for file, weights in opened.items():
        for name in weights.sizes():
            holders.setdefault((name, hashlib.sha256(weights.view(name).data).digest()), []).append(file)
    groups: dict[tuple[WeightsFile, ...], list[str]] = {}
    for (name, _), files in holders.items():
        if len({file.target for file in files}) > 1:
            groups.setdefault(tuple(files), []).append(name)
    return groups


def _shared_names(groups: Mapping[tuple[WeightsFile, ...], object]) -> dict[tuple[WeightsFile, ...], str]:
    """The file name for the weights of each group: its targets, and a number if ranks make several groups."""
    found: dict[tuple[WeightsFile, ...], str] = {}
    for holders in groups:
        stem = f"{SHARED}/" + "+".join(dict.fromkeys(holder.target for holder in holders))
        taken = sum(name.startswith((f"{stem}.", f"{stem}-")) for name in found.values())
        found[holders] = f"{stem}{f'-{taken}' if taken else ''}.safetensors"
    return found


def _write_tensors(path: Path, weights: MappedWeights, names: list[str]) -> None:
    sizes = weights.sizes()
    with path.open("wb") as file:
        file.write(weights_header({name: sizes[name] for name in names}))
        for name in names:
            file.write(weights.view(name).data)

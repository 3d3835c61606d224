"""Chooses the target that this machine runs from an engine with several: one for its GPU, else one for its CPU.

The code that looks for GPUs is imported only if there are targets to choose from.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import DeviceError, IccError, UsageError
from .format.isa import cpu_flags, select_library
from .format.load import read_manifest, read_targets
from .format.manifest import Manifest
from .format.targets import Targets
from .options import LoadOptions

if TYPE_CHECKING:
    from .executor.cuda.driver import DeviceFacts


@dataclass(frozen=True)
class TargetHere:
    """One target of an engine. runs: whether this machine can run it; why: the device that does, or the reason why none
    does. rank: the target with the lowest is chosen: 0 the GPU's own target, 1 another of its architecture, 2 a
    CPU's."""

    target: str
    runs: bool
    why: str
    rank: int


def of_this_machine(options: LoadOptions) -> LoadOptions:
    """The options with the path of the target to load; unchanged for an engine with one target. UsageError if the
    engine does not have the target that is asked for; DeviceError if this machine runs none of its targets."""
    root = Path(options.path)
    targets = read_targets(root)
    if targets is None:
        if options.target is not None and options.target != (own := read_manifest(root).target):
            raise UsageError(f"target = {options.target!r}: {root} is for {own} alone", "leave it out")
        return replace(options, target=None)
    if options.target is None:
        return replace(options, path=str(root / chosen(candidates(root, targets, options)).target))
    if options.target not in targets.targets:
        known = ", ".join(targets.targets)
        raise UsageError(f"target = {options.target!r}: {root} has no such target", f"it has: {known}")
    return replace(options, path=str(root / options.target), target=None)


def chosen(found: Sequence[TargetHere]) -> TargetHere:
    """The target with the lowest rank that runs, the first of equals. DeviceError if none runs."""
    if running := [one for one in found if one.runs]:
        return min(running, key=lambda one: one.rank)
    reasons = "; ".join(f"{one.target}: {one.why}" for one in found)
    raise DeviceError(
        f"this machine runs none of the engine's targets: {reasons}",
        "compile the model for this machine: --target auto",
    )


def candidates(root: Path, targets: Targets, options: LoadOptions) -> list[TargetHere]:
    """All targets, in the engine's order, and whether this machine runs them. `options` may name a GPU by number
    (default: the first); if they do, no CPU target runs."""
    manifests = {target: read_manifest(root / target) for target in targets.targets}
    devices = {
        backend: _device(backend, options.device or 0)
        for backend in dict.fromkeys(manifest.backend for manifest in manifests.values())
        if backend != "cpu"
    }
    found: list[TargetHere] = []
    for target, manifest in manifests.items():
        if manifest.backend == "cpu":
            found.append(_on_cpu(target, manifest, options))
        else:
            found.append(_on_gpu(target, manifest, devices[manifest.backend], [*manifests]))
    return found


def _device(backend: str, ordinal: int) -> DeviceFacts | DeviceError:
    """The facts of the GPU that a back end finds, or the error if there is none."""
    from .executor.cuda import compat

    try:
        opened = compat.open_gpu(backend, ordinal)
        try:
            return opened.facts()
        finally:
            opened.close()
    except DeviceError as error:
        return error


def _on_gpu(target: str, manifest: Manifest, device: DeviceFacts | DeviceError, names: Sequence[str]) -> TargetHere:
    from .executor.cuda.compat import check_device
    from .this_gpu import target_named

    if isinstance(device, DeviceError):
        return TargetHere(target, False, device.message, 1)
    try:
        if manifest.gpu is None:
            raise DeviceError("it does not say what GPU it needs", "")
        check_device(target, manifest.gpu, device)
    except IccError as error:
        return TargetHere(target, False, error.message, 1)
    named = target_named(device.name, names) == target
    fits = "its GPU is here" if named else f"a GPU of its architecture, {manifest.gpu.arch}, is here"
    return TargetHere(target, True, f"{fits}: {device.name}", 1 - named)


def _on_cpu(target: str, manifest: Manifest, options: LoadOptions) -> TargetHere:
    if options.device is not None:
        return TargetHere(target, False, f"device = {options.device} is a GPU's", 2)
    try:
        library = select_library(manifest.main.libraries, cpu_flags(), options.isa or os.environ.get("ICC_ISA"))
    except IccError as error:
        return TargetHere(target, False, error.message, 2)
    return TargetHere(target, True, f"this CPU has {library.isa}", 2)

"""The first part of loading an engine: its files are verified in threads while modules are imported."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from .choosing import of_this_machine
from .errors import UsageError
from .format.load import Opening, begin_opening, check_abi, read_manifest

if TYPE_CHECKING:
    from .executor.cuda.driver import Cuda
    from .format.files import DigestPieces
    from .format.manifest import Manifest
    from .options import LoadOptions


class Begun(msgspec.Struct, frozen=True):
    """An engine that is being opened, and its open GPU; None for a CPU engine."""

    opening: Opening
    gpu: Cuda | None


def begin(options: LoadOptions) -> Begun:
    """Begin to load an engine; `loading.open_llm` completes it. Files are hashed in threads while the caller imports
    modules. UsageError if `device` is set for a CPU engine, or `cores` for a GPU engine."""
    options = of_this_machine(options)
    manifest = read_manifest(Path(options.path))
    if options.require_signature is not None:
        from .trust.engine_signature import require_signatures

        require_signatures(manifest, options)
    if manifest.backend == "cpu" and options.device is not None:
        raise UsageError(f"device = {options.device}: the engine runs on the CPU", "leave it out; see also cores")
    if manifest.backend != "cpu" and options.cores is not None:
        raise UsageError(f"cores = {options.cores!r}: the engine runs on a GPU", "leave it out; see also device")
    gpu = _open_gpu(manifest, options.device or 0)  # before the files are read, so that a wrong GPU is reported at once
    return Begun(
        begin_opening(options.path, manifest, verify=options.verify, isa=options.isa, load_digests=_digests), gpu
    )


def _open_gpu(manifest: Manifest, ordinal: int) -> Cuda | None:
    """Open and check the GPU for an engine; None for a CPU engine."""
    if manifest.backend == "cpu" or manifest.gpu is None:  # without gpu facts, begin_opening refuses it
        return None
    check_abi(manifest)
    from .executor.cuda.compat import open_device, open_gpu

    return open_device(manifest.target, manifest.gpu, open_gpu(manifest.backend, ordinal))


def _digests(image: bytes, name: str) -> DigestPieces:
    from .executor.cpu.library import KernelLibrary

    return KernelLibrary(image, name).digest_pieces

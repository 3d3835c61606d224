"""open_llm: an engine loaded. Its files are compared with their digests while what runs it is being imported."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from .format.load import begin_opening, check_abi, read_manifest

if TYPE_CHECKING:
    from .executor.cuda.driver import Cuda
    from .format.files import HashPieces
    from .format.manifest import Manifest
    from .llm import LLM
    from .options import LoadOptions


def open_llm(options: LoadOptions) -> LLM:
    """The engine loaded as the options say; see `load`."""
    manifest = read_manifest(Path(options.path))
    gpu = _open_gpu(manifest)  # before the files are read: a wrong GPU shows at once
    opening = begin_opening(options.path, manifest, verify=options.verify, isa=options.isa, load_hasher=_hasher)
    try:
        from .llm import assemble  # half of the time until the first token goes into this
    except BaseException:
        opening.drop()
        raise
    return assemble(opening.finish(), options, gpu)


def _open_gpu(manifest: Manifest) -> Cuda | None:
    """The GPU that an engine needs, checked; None for a CPU engine."""
    if manifest.backend == "cpu" or manifest.gpu is None:  # without gpu facts, begin_opening refuses it in words
        return None
    check_abi(manifest)
    from .executor.cuda.compat import open_device

    return open_device(manifest.target, manifest.gpu)


def _hasher(image: bytes, name: str) -> HashPieces:
    from .executor.cpu.library import KernelLibrary

    return KernelLibrary(image, name).sha256

"""The digests of an engine's files, as engine.json states them."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

from ...runtime.format.isa import cpu_flags, runs_here
from ...runtime.format.manifest import PIECE, FileEntry, Library

Digest = Callable[[bytes], str]  # BLAKE3 of at most PIECE bytes, in hex


def file_entry(path: Path, blake3: Digest | None = None) -> FileEntry:
    """Size and digests of one file, read once. blake3: the digest of its pieces; None for sha256."""
    whole, pieces, size = hashlib.sha256(), [], 0
    with path.open("rb") as file:
        while piece := file.read(PIECE):
            whole.update(piece)
            pieces.append(blake3(piece) if blake3 else hashlib.sha256(piece).hexdigest())
            size += len(piece)
    if len(pieces) < 2:
        return FileEntry(size, whole.hexdigest())
    return FileEntry(size, whole.hexdigest(), pieces, "blake3" if blake3 else "sha256")


def library_digest(stage: Path, libraries: Sequence[Library]) -> Digest | None:
    """The BLAKE3 function in an engine's own libraries, which is used again when the engine is opened. None for an
    engine for GPUs, or if this machine can run none of the libraries."""
    flags = cpu_flags()
    found = next((library.path for library in libraries if runs_here(library, flags)), None)
    if found is None:
        return None
    compute = ctypes.CDLL(str(stage / found)).icc_blake3
    integer = ctypes.c_int64
    compute.restype = None
    compute.argtypes = (ctypes.c_char_p, integer, integer, ctypes.POINTER(integer), ctypes.c_char_p)

    def digest(content: bytes) -> str:
        made = ctypes.create_string_buffer(32)
        compute(content, len(content), PIECE, integer(), made)
        return made.raw.hex()

    return digest

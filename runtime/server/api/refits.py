"""Refits: the server goes on with the weights that `icc refit` has put into its engine."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ...errors import IccError
from ...format.load import open_engine, weight_files
from ...format.manifest import FileEntry, Manifest
from ..engine.engine_pool import EnginePool
from .errors import HttpError

_MODEL = ("target", "model", "limits", "kernel_abi", "embedding", "tokenizer_dir")  # of a manifest: what stays


@dataclass
class Refits:
    """Loads an engine anew, where nothing but its weights has changed.

    path: its directory. manifest: what it was when the server was started. keyed: whether requests need an API key,
    without which nobody may refit.
    """

    engine: EnginePool
    path: Path
    manifest: Manifest
    keyed: bool

    async def refit(self, wait_s: float) -> None:
        """Requests that run have `wait_s` seconds to end with the old weights. HttpError 403 without API keys, 409
        where the engine is another, or cannot be read; EngineFailed where it cannot be loaded."""
        if not self.keyed:
            words = "weights are changed behind a key: start the server with --api-key-file"
            raise HttpError(403, words, code="no_key")
        try:
            found = await asyncio.to_thread(_verified, self.path)
        except IccError as error:
            raise HttpError(409, error.message, code="engine_unreadable") from error
        if problem := _difference(self.manifest, found):
            raise HttpError(409, f"{self.path} has another {problem}: start a server of it", code="another_engine")
        await self.engine.reload(wait_s)
        self.manifest = found


def _verified(path: Path) -> Manifest:
    """The manifest of an engine, all files of which are as they were written."""
    engine = open_engine(path)
    engine.close()
    return engine.manifest


def _difference(old: Manifest, new: Manifest) -> str:
    """What differs besides weights, and what tells of them; "" for nothing."""
    for name in _MODEL:
        if getattr(old, name) != getattr(new, name):
            return name
    before, after = _files(old), _files(new)
    return next((name for name in sorted({*before, *after}) if before.get(name) != after.get(name)), "")


def _files(manifest: Manifest) -> Mapping[str, FileEntry]:
    """The program, kernels and tokenizer."""
    kept = {manifest.main.program, *(name for name in manifest.files if name.startswith(("kernels/", "tokenizer/")))}
    return {name: manifest.files[name] for name in kept.difference(weight_files(manifest))}

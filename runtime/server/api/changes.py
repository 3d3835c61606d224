"""EngineChanges: a running server changes to other weights, or to another engine of the same model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...errors import IccError
from ...format.adapters import AdapterRoom
from ...format.load import open_engine
from ...format.manifest import FileEntry, Manifest
from ...format.open_container import open_container
from ...trust.engine_signature import check_signature, read_public_key
from ..engine.engine_pool import EnginePool
from ..engine.identity import REQUEST_FIELDS, tokenizer_files
from .adapters import ServedAdapters
from .errors import HttpError

_ENGINE = (*REQUEST_FIELDS, "target", "kernel_abi")  # fields of the manifest that stay if only weights change


@dataclass
class EngineChanges:
    """Loads an engine again, one replica after the other.

    path: the engine's directory. manifest: of the served engine. keyed: whether requests need an API key; without keys
    all changes are refused. commands: the commands of the engine processes for an engine directory. signed_by: the key
    with which engines must be signed; None for no check.
    """

    engine: EnginePool
    adapters: ServedAdapters
    path: Path
    manifest: Manifest
    keyed: bool
    commands: Callable[[Path], Sequence[Sequence[str]]]
    signed_by: str | None = None
    _under_way: bool = field(default=False, init=False)

    async def refit(self, wait_s: float) -> None:
        """Change to the weights that `icc refit` has put into the engine. Running requests have `wait_s` seconds to end
        with the old ones. HttpError 403 without API keys, 409 if more than the weights has changed or the engine cannot
        be read; EngineFailed if it cannot be loaded."""
        self._check_key()
        await self._take(self.path, wait_s, _ENGINE, _program_files)

    async def change(self, name: str, wait_s: float) -> None:
        """Change to the engine `name`, a directory beside the served one. Raises as `refit` does, and HttpError 400 for
        a name that leads elsewhere."""
        self._check_key()
        path = self.path.parent / name
        if "/" in name or name in ("", ".", ".."):
            raise HttpError(400, f"{name[:80]!r} is no name of a directory beside {self.path.name}", "engine")
        await self._take(path, wait_s, REQUEST_FIELDS, tokenizer_files)
        self.path = path

    async def read_again(self, wait_s: float) -> None:
        """Change to the engine that is in the directory now; the directory may be a link whose target has changed."""
        await self._take(self.path, wait_s, REQUEST_FIELDS, tokenizer_files)

    def _check_key(self) -> None:
        if not self.keyed:
            words = "changing the engine needs an API key: start the server with --api-key-file"
            raise HttpError(403, words, code="no_key")

    async def _take(
        self, path: Path, wait_s: float, fields: Sequence[str], files: Callable[[Manifest], Mapping[str, FileEntry]]
    ) -> None:
        """Load the engine at `path`, whose `fields` and `files` must equal those of the served engine. A change during
        another change is refused, because it would be undefined which engine is served afterwards."""
        if self._under_way:
            raise HttpError(409, "the engine is being changed already: try again later", code="change_under_way")
        self._under_way = True
        try:
            await self._change_to(path, wait_s, fields, files)
        finally:
            self._under_way = False

    async def _change_to(
        self, path: Path, wait_s: float, fields: Sequence[str], files: Callable[[Manifest], Mapping[str, FileEntry]]
    ) -> None:
        try:
            found, room = await asyncio.to_thread(_verified, path, self.signed_by)
        except IccError as error:
            raise HttpError(409, error.message, code="engine_unreadable") from error
        problem = next((name for name in fields if getattr(self.manifest, name) != getattr(found, name)), "")
        before, after = files(self.manifest), files(found)
        problem = problem or next((n for n in sorted({*before, *after}) if before.get(n) != after.get(n)), "")
        if problem:
            raise HttpError(409, f"{path} has another {problem}: start a server of it", code="another_engine")
        if self.adapters.all and (lacking := _lacking(room, self.engine.room)):
            raise HttpError(409, f"{path} has no room for {lacking}", code="another_engine")
        await self.engine.reload(wait_s, self.commands(path))
        self.manifest = found


def _lacking(room: AdapterRoom | None, before: AdapterRoom | None) -> str:
    """Which of the loaded adapters may not fit, in words; "" if all fit. room: what the new engine can hold. before:
    the same of the served engine."""
    if room is None:
        return "the adapters that are loaded"
    lacking = "" if before is None else room.lacking(before)
    return f"adapters of {lacking}, which the served engine can hold, and adapters are loaded" if lacking else ""


def _verified(path: Path, signed_by: str | None) -> tuple[Manifest, AdapterRoom | None]:
    """The manifest of an engine and its room for adapters, after a check of the hashes of all files. SignatureError if
    it is not signed by the key."""
    engine = open_engine(path)
    engine.close()
    if signed_by is not None:
        check_signature(open_container(path), engine.manifest, read_public_key(signed_by))
    plan = engine.program.adapters
    return engine.manifest, None if plan is None else plan.room


def _program_files(manifest: Manifest) -> Mapping[str, FileEntry]:
    """The entries of the program, the kernels and the tokenizer, by name."""
    kept = {manifest.main.program, *(name for name in manifest.files if name.startswith(("kernels/", "tokenizer/")))}
    return {name: manifest.files[name] for name in kept.difference(manifest.weight_files())}

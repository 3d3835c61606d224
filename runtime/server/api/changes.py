"""EngineChanges: the server goes on with other weights, or with another engine of the same model."""

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

_ENGINE = (*REQUEST_FIELDS, "target", "kernel_abi")  # what stays of a manifest where only weights change


@dataclass
class EngineChanges:
    """Loads an engine anew, one replica after the other.

    path: its directory. manifest: of what is served now. keyed: whether requests need an API key, without which nobody
    may change anything. commands: the engine processes for an engine directory. signed_by: the key whose
    signature engines must have.
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
        """Go on with the weights that `icc refit` has put into the engine. Requests that run have `wait_s` seconds to
        end with the old ones. HttpError 403 without API keys, 409 where more than the weights has changed, or the
        engine cannot be read; EngineFailed where it cannot be loaded."""
        self._check_key()
        await self._take(self.path, wait_s, _ENGINE, _program_files)

    async def change(self, name: str, wait_s: float) -> None:
        """Go on with the engine of that name, a directory beside the one that is served. Raises as `refit` does, and
        HttpError 400 for a name that leads elsewhere."""
        self._check_key()
        path = self.path.parent / name
        if "/" in name or name in ("", ".", ".."):
            raise HttpError(400, f"{name[:80]!r} is no name of a directory beside {self.path.name}", "engine")
        await self._take(path, wait_s, REQUEST_FIELDS, tokenizer_files)
        self.path = path

    async def read_again(self, wait_s: float) -> None:
        """Go on with what is in the engine's directory now, which may be a link to another one than before."""
        await self._take(self.path, wait_s, REQUEST_FIELDS, tokenizer_files)

    def _check_key(self) -> None:
        if not self.keyed:
            words = "engines are changed behind a key: start the server with --api-key-file"
            raise HttpError(403, words, code="no_key")

    async def _take(
        self, path: Path, wait_s: float, fields: Sequence[str], files: Callable[[Manifest], Mapping[str, FileEntry]]
    ) -> None:
        """Load what is at `path`, of which these fields and files must be as they are. One change at a time: a second
        one is refused, because it cannot be said which of the two would be served then."""
        if self._under_way:
            raise HttpError(409, "the engine is being changed already: ask again after that", code="change_under_way")
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
    """What of the adapters that are loaded may not fit, in words; "" where all fit that did before."""
    if room is None:
        return "the adapters that are loaded"
    lacking = "" if before is None else room.lacking(before)
    return f"adapters of {lacking}, which the engine that is served has, and some are loaded" if lacking else ""


def _verified(path: Path, signed_by: str | None) -> tuple[Manifest, AdapterRoom | None]:
    """The manifest of an engine, all files of which are as they were written, and its room for adapters. SignatureError
    where it is not signed by the key."""
    engine = open_engine(path)
    engine.close()
    if signed_by is not None:
        check_signature(open_container(path), engine.manifest, read_public_key(signed_by))
    plan = engine.program.adapters
    return engine.manifest, None if plan is None else plan.room


def _program_files(manifest: Manifest) -> Mapping[str, FileEntry]:
    """The program, kernels and tokenizer."""
    kept = {manifest.main.program, *(name for name in manifest.files if name.startswith(("kernels/", "tokenizer/")))}
    return {name: manifest.files[name] for name in kept.difference(manifest.weight_files())}

"""PromptFolder: the directory in which a server keeps prompts on disk, as passed to its processes."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import msgspec

from ...errors import UsageError
from ...format.manifest import Manifest

_SECRET = "secret"


class PromptFolder(msgspec.Struct, frozen=True):
    """path: a directory. most_bytes: the most bytes of the prompts in it."""

    path: str
    most_bytes: int

    @classmethod
    def of(cls, path: Path, most_bytes: int | None) -> PromptFolder:
        """The folder for options of the command line. most_bytes: None for 16 GiB."""
        return cls(str(path.absolute()), 16 << 30 if most_bytes is None else most_bytes)

    def to_json(self) -> str:
        """The folder as an argument of a process."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str) -> PromptFolder:
        """The folder of a text that `to_json` gave."""
        return msgspec.json.decode(text, type=cls)

    def check(self, manifest: Manifest) -> None:
        """UsageError if an engine's prompts cannot be kept on disk."""
        why = ""
        if manifest.backend != "cpu":
            why = "the KV cache is in a GPU's memory"
        elif manifest.main.is_stage:
            why = "the KV caches of its layers are in several processes"
        elif manifest.embedding is not None:
            why = "the KV of an embedding engine is not kept"
        if why:
            raise UsageError(f"--prompt-cache {self.path}: {why}, and is not written to disk", "leave it out")

    def secret(self) -> bytes:
        """The secret of ApiKeys, which is stored so that salts stay the same after a restart. UsageError if the
        directory cannot be used."""
        file = Path(self.path, _SECRET)
        try:
            file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            try:
                with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
                    stream.write(secrets.token_bytes(32))
            except FileExistsError:
                pass
            found = file.read_bytes()
        except OSError as error:
            raise UsageError(f"--prompt-cache {self.path}: cannot be used: {error.strerror}") from error
        if len(found) != 32:
            raise UsageError(
                f"--prompt-cache {self.path}: {_SECRET} is damaged", "remove it; the kept prompts are lost"
            )
        return found

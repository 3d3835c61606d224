"""StoredAnswers: the answers of `map_batches`, in a directory that all machines share, so that a run can be resumed."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec

from ..errors import UsageError


class RowAnswer(msgspec.Struct, array_like=True, frozen=True):
    """The answer of a row. error: why it has none; "" if it has one. tokens: of the answer."""

    text: str
    finish_reason: str
    tokens: int
    error: str = ""


class _Line(msgspec.Struct, array_like=True, frozen=True):
    key: str
    answer: RowAnswer


def row_key(engine: str, params: bytes, prompt: Any) -> str:
    """The key of an answer: a digest of the engine, the sampling parameters and the prompt."""
    digest = blake2b(digest_size=16)
    for part in (engine.encode(), params, msgspec.json.encode(prompt, order="deterministic")):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


class StoredAnswers:
    """One file per batch of answers, written atomically and never changed. Errors are not kept: the next run tries such
    a row again. folder: None keeps nothing."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._found: dict[str, RowAnswer] = {}
        if folder is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                for file in sorted(folder.glob("*.jsonl")):
                    self._read(file)
            except OSError as error:
                raise UsageError(
                    f"{folder} cannot be used: {error.strerror}", "a directory to keep answers in"
                ) from error

    def get(self, key: str) -> RowAnswer | None:
        """The answer of a row; None if there is none yet."""
        return self._found.get(key)

    def put(self, answers: Iterable[tuple[str, RowAnswer]]) -> None:
        """Keep the answers of a batch."""
        new = [_Line(key, answer) for key, answer in answers if not answer.error]
        if self._folder is None or not new:
            return
        name = self._folder / uuid.uuid4().hex
        with name.with_suffix(".partial").open("wb") as file:
            file.write(msgspec.json.Encoder().encode_lines(new))
            file.flush()
            os.fsync(file.fileno())
        os.replace(name.with_suffix(".partial"), name.with_suffix(".jsonl"))
        self._found.update((line.key, line.answer) for line in new)

    def _read(self, file: Path) -> None:
        try:
            lines = msgspec.json.Decoder(_Line).decode_lines(file.read_bytes())
        except msgspec.DecodeError as error:
            raise UsageError(f"{file} does not hold answers of map_batches", "give another directory") from error
        self._found.update((line.key, line.answer) for line in lines)

"""Files that an engine is compiled with: system prompts, whose KV it holds, and forms of answers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .calibration import read_text
from .errors import UsageError


@dataclass(frozen=True)
class PromptFile:
    """A file of --prefix: a text, or messages of a conversation, each with role and content."""

    path: Path
    text: str
    messages: list[dict[str, Any]] | None = None

    @property
    def option(self) -> str:
        """The option as the user gave it."""
        return f"--prefix {self.path}"


def read_prompt_file(path: Path) -> PromptFile:
    """Read a file of --prefix: messages if it ends in .json, else a text. UsageError says what is wrong with it."""
    text = read_text(path)
    if not text.strip():
        raise UsageError(f"--prefix {path} is empty")
    if path.suffix != ".json":
        return PromptFile(path, text)
    try:
        messages = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--prefix {path} is no JSON: {error}") from error
    if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
        raise UsageError(
            f"--prefix {path} is no list of messages",
            'give [{"role": "system", "content": "..."}, ..], or a text in a file with another ending',
        )
    return PromptFile(path, text, messages)


def _is_message(found: object) -> bool:
    return isinstance(found, dict) and isinstance(found.get("role"), str) and isinstance(found.get("content"), str)


@dataclass(frozen=True)
class FormFile:
    """A file of --schema or --grammar. schema: None for a grammar."""

    path: Path
    kind: Literal["schema", "grammar"]
    text: str
    schema: dict[str, Any] | bool | None = None

    @property
    def option(self) -> str:
        """The option as the user gave it."""
        return f"--{self.kind} {self.path}"


def read_form_file(path: Path, kind: Literal["schema", "grammar"]) -> FormFile:
    """Read a file of --schema, which is JSON, or of --grammar, in Lark's or llama.cpp's notation. UsageError says what
    is wrong with it."""
    text = read_text(path)
    if not text.strip():
        raise UsageError(f"--{kind} {path} is empty")
    if kind == "grammar":
        return FormFile(path, kind, text)
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--schema {path} is no JSON: {error}") from error
    if not isinstance(schema, dict | bool):
        raise UsageError(f"--schema {path} is no JSON schema", "a schema is an object")
    return FormFile(path, kind, text, schema)


@dataclass(frozen=True)
class PromptTokens:
    """The token ids that begin every prompt which begins with a file."""

    source: str
    kind: Literal["system", "messages", "text"]
    tokens: tuple[int, ...]
    warning: str = ""

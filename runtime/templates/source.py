"""Where an engine has its chat template, and what stands for its special tokens."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import EngineFormatError, MissingExtraError, UsageError

if TYPE_CHECKING:
    from .template import ChatTemplate

MAX_BYTES = 1 << 20  # of a template
_SPECIAL = re.compile(r"^(bos|eos|unk|sep|pad|cls|mask)_token$")


@dataclass(frozen=True)
class TemplateSource:
    """The text of a chat template, "" where there is none; `special_tokens` are its variables bos_token, eos_token and
    so on."""

    text: str
    special_tokens: dict[str, str]

    def open(self) -> ChatTemplate | None:
        """The template, ready to render; None where there is none. TemplateRefused if it is in no language that
        minijinja knows, MissingExtraError without minijinja."""
        if not self.text:
            return None
        try:
            from .template import ChatTemplate
        except ModuleNotFoundError as error:
            raise MissingExtraError(
                f"chat templates need {error.name}, which is not installed", f"pip install {error.name}"
            ) from error
        return ChatTemplate(self.text, self.special_tokens)


def read_template_file(file: Path) -> str:
    """A chat template that somebody gives. UsageError if it cannot be read as text, or is no template's size."""
    try:
        with file.open("rb") as stream:
            raw = stream.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            raise UsageError(f"--chat-template {file}: is larger than {MAX_BYTES} bytes")
        return raw.decode()
    except OSError as error:
        raise UsageError(f"--chat-template {file}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"--chat-template {file}: is not UTF-8 text") from error


def read_template(read: Callable[[str], bytes | None]) -> TemplateSource:
    """The template among an engine's tokenizer files; `read` gives the content of one by its name, or None.
    EngineFormatError if a file is not what its name says."""
    config = _json(read("tokenizer_config.json"), "tokenizer_config.json")
    special = _json(read("special_tokens_map.json"), "special_tokens_map.json")
    template = read("chat_template.jinja")
    text = _text(template) if template is not None else _template_of(config)
    return TemplateSource(text, _special_tokens({**special, **config}))


def _json(raw: bytes | None, name: str) -> dict[str, Any]:
    try:
        return {} if raw is None else msgspec.json.decode(raw, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise EngineFormatError(f"{name}: {error}", "compile the model again") from error


def _text(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise EngineFormatError(f"chat_template.jinja: {error}", "compile the model again") from error


def _template_of(config: dict[str, Any]) -> str:
    """The template in tokenizer_config.json: a text, or a list of named ones, of which "default" is meant."""
    found = config.get("chat_template")
    if isinstance(found, list):
        named = {item.get("name"): item.get("template") for item in found if isinstance(item, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else ""


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Each is a text, or an object with the text in `content`."""
    tokens = {}
    for name, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if _SPECIAL.match(name) and isinstance(content, str):
            tokens[name] = content
    return tokens

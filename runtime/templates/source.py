"""Reads an engine's chat templates and the texts of its special tokens."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import EngineFormatError, MissingExtraError, RequestError, UsageError
from ..format.manifest import TEMPLATE_DIR

if TYPE_CHECKING:
    from .template import ChatTemplate

MAX_BYTES = 1 << 20  # bytes of a template
_PROCESSOR = "chat_template.json"  # models with vision have their template here, often in no other file
_WORD = re.compile(r"[\w-]+")
_SPECIAL = re.compile(r"^(bos|eos|unk|sep|pad|cls|mask)_token$")


class TemplateSource(msgspec.Struct, frozen=True):
    """text: a chat template, "" if there is none. special_tokens: its variables bos_token, eos_token and so on. named:
    the model's other templates by name: "tool_use" is used if there are tools, others on request."""

    text: str
    special_tokens: dict[str, str]
    named: dict[str, str] = msgspec.field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.text or self.named)

    @property
    def names(self) -> list[str]:
        """The names of the templates; "default", if there is one, comes first."""
        return [*(["default"] if self.text else []), *self.named]

    @property
    def all_texts(self) -> str:
        """The texts of all templates, joined."""
        return "\n".join([self.text, *self.named.values()])

    def check(self, name: str | None) -> None:
        """Raise RequestError if no template has this name; None: no name was given."""
        if name is not None and name not in self.names:
            has = f"it has {', '.join(self.names)}" if self else "it has none"
            raise RequestError(
                f"chat_template: the model has no template named {name[:60]!r}; {has}", field="chat_template"
            )

    def replaced(self, given: str) -> TemplateSource:
        """A source with another template: a text from `read_template_file`, or the name of one of the model's.
        UsageError if a single word is no such name."""
        if given in self.names:
            return TemplateSource(self.named.get(given, self.text), self.special_tokens)
        if _WORD.fullmatch(given):
            has = f"templates of the model: {', '.join(self.names) or 'none'}"
            raise UsageError(f"--chat-template {given}: is no file, and no template of the model", has)
        return TemplateSource(given, self.special_tokens)

    def open(self) -> ChatTemplate | None:
        """The template, ready to render; None if there is none. TemplateRefused if minijinja cannot parse it,
        MissingExtraError without minijinja."""
        if not self:
            return None
        try:
            from .template import ChatTemplate
        except ModuleNotFoundError as error:
            raise MissingExtraError(
                f"chat templates need {error.name}, which is not installed", f"pip install {error.name}"
            ) from error
        return ChatTemplate(self.text, self.special_tokens, self.named)


def read_template_file(file: Path) -> str:
    """The text of a user's chat template; a word that is no file is returned, as the name of one of the model's
    templates. UsageError if the file is no readable text, or too large."""
    if _WORD.fullmatch(str(file)) and not file.exists():
        return str(file)
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


def read_template(read: Callable[[str], bytes | None], names: Iterable[str] = ()) -> TemplateSource:
    """Read the templates among an engine's tokenizer files. read: gives a file's content by name, or None. names: those
    of all files. EngineFormatError if a file has the wrong format."""
    config = _json(read("tokenizer_config.json"), "tokenizer_config.json")
    special = _json(read("special_tokens_map.json"), "special_tokens_map.json")
    template = read("chat_template.jinja")
    named = _templates_of(config)
    for name, text in _templates_of(_json(read(_PROCESSOR), _PROCESSOR)).items():
        named.setdefault(name, text)
    if template is not None:
        named["default"] = _text(template, "chat_template.jinja")
    for name in names:
        folder, _, file = name.rpartition("/")
        if folder == TEMPLATE_DIR and file.endswith(".jinja"):
            named[file.removesuffix(".jinja")] = _text(read(name) or b"", name)
    return TemplateSource(named.pop("default", ""), _special_tokens({**special, **config}), named)


def _json(raw: bytes | None, name: str) -> dict[str, Any]:
    try:
        return {} if raw is None else msgspec.json.decode(raw, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise EngineFormatError(f"{name}: {error}", "compile the model again") from error


def _text(raw: bytes, name: str) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise EngineFormatError(f"{name}: {error}", "compile the model again") from error


def _templates_of(config: dict[str, Any]) -> dict[str, str]:
    """The templates in a configuration file by name: a text is "default", a list has named ones."""
    found = config.get("chat_template")
    if isinstance(found, str):
        return {"default": found}
    items = [item for item in found if isinstance(item, dict)] if isinstance(found, list) else []
    named = [(item.get("name"), item.get("template")) for item in items]
    return {name: text for name, text in named if isinstance(name, str) and isinstance(text, str) and text}


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """The special tokens in a configuration; each is a text, or an object with the text in `content`."""
    tokens = {}
    for name, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if _SPECIAL.match(name) and isinstance(content, str):
            tokens[name] = content
    return tokens

"""ServedModel: what the HTTP process knows of the engine without running it: its manifest, tokenizer and template."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from ...errors import EngineFormatError, UsageError
from ...format.files import EngineFiles
from ...format.load import read_manifest
from ...format.manifest import Manifest
from ...format.verify import check_listing
from ...tokenizer import Tokenizer
from . import limits
from .errors import HttpError

_SPECIAL = re.compile(r"^(bos|eos|unk|sep|pad|cls|mask)_token$")


@dataclass(frozen=True)
class ServedModel:
    """`name` is what requests call it, `names` holds it and its aliases. The chat template is "" where there is none;
    `special_tokens` are its variables bos_token, eos_token and so on."""

    name: str
    created: int
    manifest: Manifest
    tokenizer: Tokenizer | None
    chat_template: str
    special_tokens: dict[str, str]
    aliases: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)

    @property
    def max_len(self) -> int:
        return self.manifest.limits.max_seq_len

    @property
    def vocab_size(self) -> int:
        return self.manifest.model.vocab_size

    @property
    def embeds(self) -> bool:
        return self.manifest.embedding is not None

    def check_task(self, embeds: bool) -> None:
        """HttpError 404 for a request that the engine was not compiled for."""
        if embeds != self.embeds:
            negation = "" if self.embeds else "not "
            raise HttpError(404, f"this engine was {negation}compiled for embeddings", code="unsupported")

    def token_bytes(self, token: int) -> bytes:
        """The bytes of a token, those of its text if it is a special one."""
        return b"" if self.tokenizer is None else self.tokenizer.token_bytes(token)

    def token_text(self, token: int) -> str:
        """A token by itself, special tokens included; one that is part of a character as OpenAI writes it."""
        raw = self.token_bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def text(self, tokens: Sequence[int]) -> str:
        return "" if self.tokenizer is None else self.tokenizer.decode(tokens)


def open_model(path: Path, name: str | None = None, verify: bool = True) -> ServedModel:
    """The model of an engine directory, under one name, or several with commas. EngineFormatError if a file is damaged
    or changed."""
    manifest = read_manifest(path)
    check_listing(path, manifest)
    files = EngineFiles(path, manifest.files, verify)

    def read(file: str) -> bytes | None:
        file = f"{manifest.tokenizer_dir}/{file}"
        return files.read(file) if file in manifest.files else None

    raw = read("tokenizer.json")
    config = _json(read("tokenizer_config.json"), "tokenizer_config.json")
    special = _json(read("special_tokens_map.json"), "special_tokens_map.json")
    template = read("chat_template.jinja")
    names = [part.strip() for part in (name or "").split(",") if part.strip()]
    first, *aliases = dict.fromkeys(names or [path.resolve().name.removesuffix(".engine")])
    return ServedModel(
        name=first,
        aliases=tuple(aliases),
        created=int((path / "engine.json").stat().st_mtime),
        manifest=manifest,
        tokenizer=None if raw is None else Tokenizer(raw),
        chat_template=_text(template) if template is not None else _template_of(config),
        special_tokens=_special_tokens({**special, **config}),
    )


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


def read_template_file(file: Path) -> str:
    """A chat template that somebody gives. UsageError if it cannot be read as text, or is no template's size."""
    try:
        with file.open("rb") as stream:
            raw = stream.read(limits.TEMPLATE_BYTES + 1)
        if len(raw) > limits.TEMPLATE_BYTES:
            raise UsageError(f"--chat-template {file}: is larger than {limits.TEMPLATE_BYTES} bytes")
        return raw.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--chat-template {file}: cannot be read as UTF-8 text: {error}") from error

"""ServedModel: what the HTTP process knows of the engine without running it: its manifest, tokenizer and template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from ...format.files import EngineFiles
from ...format.forms import read_forms
from ...format.load import read_manifest
from ...format.manifest import Manifest
from ...format.open_container import open_container
from ...format.present import engine_name
from ...format.verify import check_listing
from ...prompting import Prompting
from ...templates.source import TemplateSource, read_template
from ...tokenizer import Tokenizer
from .errors import HttpError
from .fill import fill_marks


@dataclass(frozen=True)
class ServedModel:
    """name: the model's name in requests; `names` holds it and its aliases. created: in seconds since 1970. forms: the
    lowered grammars that the engine was compiled with, by their text before lowering."""

    name: str
    created: int
    manifest: Manifest
    tokenizer: Tokenizer | None
    template: TemplateSource
    aliases: tuple[str, ...] = ()
    forms: Mapping[str, str] = field(default_factory=dict[str, str])

    @cached_property
    def prompting(self) -> Prompting:
        """Makes the queries of requests. Its `form` is set once the server has examined the template in the sandbox: no
        template is rendered in this process."""
        return Prompting(self.manifest, self.tokenizer, template=self.template)

    @property
    def names(self) -> tuple[str, ...]:
        """The names that requests may use."""
        return (self.name, *self.aliases)

    @property
    def max_len(self) -> int:
        """The most tokens of a prompt and its answer together."""
        return self.manifest.limits.max_seq_len

    @property
    def vocab_size(self) -> int:
        """How many token ids there are: 0 to vocab_size - 1."""
        return self.manifest.model.vocab_size

    @property
    def embeds(self) -> bool:
        """Whether the engine computes vectors, or scores of pairs, instead of text."""
        return self.manifest.embedding is not None

    @property
    def fills(self) -> bool:
        """Whether the vocabulary has tokens for fill in the middle."""
        return self.tokenizer is not None and fill_marks(self.tokenizer) is not None

    @property
    def task(self) -> str:
        """What the engine was compiled for: "generate", "embed" or "rerank"."""
        facts = self.manifest.embedding
        return "generate" if facts is None else "rerank" if facts.scores else "embed"

    def check_task(self, task: str) -> None:
        """HttpError 404 for a request that the engine was not compiled for."""
        names = {"generate": "to generate text", "embed": "for embeddings", "rerank": "to score texts"}
        if task != self.task:
            made = "" if self.embeds else "not "
            named = names[self.task if self.embeds else task]
            raise HttpError(404, f"this engine was {made}compiled {named}", code="unsupported")

    def token_bytes(self, token: int) -> bytes:
        """The bytes of a token; for a special token, those of its text."""
        return b"" if self.tokenizer is None else self.tokenizer.token_bytes(token)

    def token_text(self, token: int) -> str:
        """The text of one token, also of a special one; a token that is part of a character is written as OpenAI writes
        it."""
        raw = self.token_bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def text(self, tokens: Sequence[int]) -> str:
        """The text of token ids; "" without a tokenizer."""
        return "" if self.tokenizer is None else self.tokenizer.decode(tokens)


def open_model(path: Path, name: str | None = None, verify: bool = True) -> ServedModel:
    """The model of an engine. name: one name, or several separated by commas; None: the engine's own. EngineFormatError
    if a file is damaged or changed."""
    manifest = read_manifest(path)
    container = open_container(path)
    check_listing(container, manifest)
    files = EngineFiles(container, manifest.files, verify, manifest.base)

    def read(file: str) -> bytes | None:
        file = f"{manifest.tokenizer_dir}/{file}"
        return files.read(file) if file in manifest.files else None

    raw = read("tokenizer.json")
    names = [part.strip() for part in (name or "").split(",") if part.strip()]
    first, *aliases = dict.fromkeys(names or [engine_name(path.resolve())])
    return ServedModel(
        name=first,
        aliases=tuple(aliases),
        created=int(container.modified),
        manifest=manifest,
        tokenizer=None if raw is None else Tokenizer(raw),
        template=read_template(read, manifest.tokenizer_names),
        forms={form.asked: form.lowered for form in read_forms(files, manifest)},
    )

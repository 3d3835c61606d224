"""What is before a text that is embedded, and what is left of one that is too long."""

from __future__ import annotations

from typing import Literal, TypedDict

from .errors import RequestError
from .format.manifest import Manifest
from .tokenizer import Tokenizer

# what any model can be asked for, as sentence-transformers, Jina, Cohere and models themselves call it
_ANY = (
    ("query", "search_query", "retrieval.query"),
    ("document", "passage", "corpus", "search_document", "retrieval.passage"),
)


class EmbedOptions(TypedDict, total=False):
    """What comes before a text, and what is done with one that is too long. prompt: a text; or prompt_name: one of the
    model's own, such as "query" (else its default, where it has one); any model can be asked for "query" and
    "document": what it has for them, or its default. truncate: what is longer than the engine takes, or than `longest`
    tokens, loses its end, or with "start" its beginning."""

    prompt: str | None
    prompt_name: str | None
    truncate: bool | Literal["start", "end"]
    longest: int | None


def prompt_names(manifest: Manifest) -> list[str]:
    """What a prompt of the model may be called."""
    own = () if manifest.embedding is None else manifest.embedding.prompts
    return list(dict.fromkeys((*own, *(name for names in _ANY for name in names))))


def check_prompt_name(manifest: Manifest, name: str | None, field: str = "prompt_name") -> None:
    """RequestError, of that field, if the model accepts no prompt of that name; None for no name."""
    if name is not None and name not in prompt_names(manifest):
        own = () if manifest.embedding is None else manifest.embedding.prompts
        raise RequestError(f"the model has no prompt {name!r}", f"it has: {', '.join(own) or 'none'}", field=field)


def encode_prompted(
    tokenizer: Tokenizer, manifest: Manifest, text: str, options: EmbedOptions
) -> tuple[list[int], int]:
    """Token ids of a text and its prompt, special tokens around both, and how many of the first are not pooled."""
    before, longest, facts = _prompt(manifest, options), _longest(manifest, options), manifest.embedding
    if longest is None:
        ids = tokenizer.encode(before + text)
    else:
        ids = tokenizer.encode_within(before + text, longest, options.get("truncate") == "start")
    skips = facts is not None and facts.skips_prompt and before
    return ids, _length(tokenizer, before) if skips else 0


def cut(ids: list[int], manifest: Manifest, options: EmbedOptions) -> list[int]:
    """Token ids of a text as they are given, whose prompt is in them: RequestError if `options` name one."""
    if options.get("prompt") is not None or options.get("prompt_name") is not None:
        raise RequestError(
            "token ids are taken as they are, so that no prompt can be put before them", "give a text", field="prompt"
        )
    longest = _longest(manifest, options)
    if longest is None or len(ids) <= longest:
        return ids
    return ids[-longest:] if options.get("truncate") == "start" else ids[:longest]


def _prompt(manifest: Manifest, options: EmbedOptions) -> str:
    """The text before another one, as sentence-transformers chooses it."""
    prompts = {} if manifest.embedding is None else manifest.embedding.prompts
    default = "" if manifest.embedding is None else manifest.embedding.default_prompt
    if (prompt := options.get("prompt")) is not None:
        return prompt
    name = options.get("prompt_name")
    if name is None:
        return prompts.get(default, "")
    if name in prompts:
        return prompts[name]
    check_prompt_name(manifest, name)
    same = next(names for names in _ANY if name in names)
    return next((prompts[one] for one in same if one in prompts), prompts.get(default, ""))


def _longest(manifest: Manifest, options: EmbedOptions) -> int | None:
    """How many tokens a text may have before it loses some; None for as many as it has."""
    longest, most = options.get("longest"), manifest.limits.max_seq_len
    return (most if longest is None else min(longest, most)) if options.get("truncate") else None


def _length(tokenizer: Tokenizer, before: str) -> int:
    """Tokens of a prompt alone, without a special token that ends a text."""
    ids = tokenizer.encode(before)
    return len(ids) - (bool(ids) and ids[-1] in tokenizer.special_tokens.values())

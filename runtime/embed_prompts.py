"""The prompts put before texts that are embedded, and the truncation of texts that are too long."""

from __future__ import annotations

from typing import Literal, TypedDict

from .errors import RequestError
from .format.manifest import Manifest
from .tokenizer import Tokenizer

# names that any model accepts: those of sentence-transformers, Jina, Cohere and the models themselves
_ANY = (
    ("query", "search_query", "retrieval.query"),
    ("document", "passage", "corpus", "search_document", "retrieval.passage"),
)


class EmbedOptions(TypedDict, total=False):
    """The prompt before a text, and the truncation of a text that is too long. prompt: a text; or prompt_name: one of
    the model's prompts, such as "query" (by default the model's default prompt, if it has one); every model accepts
    "query" and "document" and uses its default if it has no such prompt. truncate: cut the end, or with "start" the
    beginning, of a text that is longer than the engine takes or than `longest` tokens."""

    prompt: str | None
    prompt_name: str | None
    truncate: bool | Literal["start", "end"]
    longest: int | None


def prompt_names(manifest: Manifest) -> list[str]:
    """The prompt names that the model accepts."""
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
    """The token ids of a prompt and its text, with special tokens around both, and how many of the first tokens are not
    pooled."""
    before, longest, facts = _prompt(manifest, options), _longest(manifest, options), manifest.embedding
    if longest is None:
        ids = tokenizer.encode(before + text)
    else:
        ids = tokenizer.encode_within(before + text, longest, options.get("truncate") == "start")
    skips = facts is not None and facts.skips_prompt and before
    return ids, _length(tokenizer, before) if skips else 0


def cut(ids: list[int], manifest: Manifest, options: EmbedOptions) -> list[int]:
    """Truncate token ids that a caller gave, prompt included. RequestError if `options` name a prompt."""
    if options.get("prompt") is not None or options.get("prompt_name") is not None:
        raise RequestError(
            "token ids are taken as they are, so that no prompt can be put before them", "give a text", field="prompt"
        )
    longest = _longest(manifest, options)
    if longest is None or len(ids) <= longest:
        return ids
    return ids[-longest:] if options.get("truncate") == "start" else ids[:longest]


def _prompt(manifest: Manifest, options: EmbedOptions) -> str:
    """The prompt to put before a text, chosen as sentence-transformers does."""
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
    """How many tokens a text may have before it is truncated; None: it is not truncated."""
    longest, most = options.get("longest"), manifest.limits.max_seq_len
    return (most if longest is None else min(longest, most)) if options.get("truncate") else None


def _length(tokenizer: Tokenizer, before: str) -> int:
    """The number of tokens of a prompt alone, without the special token that ends a text."""
    ids = tokenizer.encode(before)
    return len(ids) - (bool(ids) and ids[-1] in tokenizer.special_tokens.values())

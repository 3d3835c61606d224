"""Query: what a prompt has become, ready for an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from .batch.scheduled import NO_EXTRAS, Extras
from .errors import RequestError
from .requests.params import SamplingParams

if TYPE_CHECKING:  # a text that is completed as it is needs no reader
    from .reading.answer import MakeReader

Adapters = str | Sequence[str | None] | None  # the name of one for all prompts, or of one per prompt; None for none
READ_ONLY = SamplingParams(max_tokens=1)  # of what is read and not answered


class Query(msgspec.Struct, frozen=True):
    """A prompt, made by Prompting for library and server alike.

    grammar: a text of `grammars.sources` that the answer must follow, "" for any text. read: makes a parser of the
    answer; None if that is plain text. extras: inputs per token besides ids, see `ScheduledSequence.extras`. adapter:
    its name, "" for none; adapter_scale: its factor. vector: whether the prompt becomes one vector, without its first
    `skipped` tokens.
    """

    token_ids: Sequence[int]
    params: SamplingParams = READ_ONLY
    grammar: str = ""
    read: MakeReader | None = None
    extras: Extras = NO_EXTRAS
    adapter: str = ""
    adapter_scale: float = 1.0
    vector: bool = False
    skipped: int = 0


def adapted(queries: Sequence[Query], adapter: Adapters, scale: float = 1.0) -> Sequence[Query]:
    """Queries with an adapter each, at this scale: one name for all, or one per query. RequestError for another number
    of names, or what is no name."""
    if adapter is None:
        return queries
    if not isinstance(adapter, Sequence):
        raise RequestError(f"adapter = {adapter!r}: must be a name, or one for each prompt", field="adapter")
    names = [adapter] * len(queries) if isinstance(adapter, str) else list(adapter)
    if len(names) != len(queries):
        raise RequestError(f"{len(names)} adapters for {len(queries)} prompts", "give one for all", field="adapter")
    named = zip(queries, names, strict=True)
    return [replace(query, adapter=name or "", adapter_scale=scale) for query, name in named]

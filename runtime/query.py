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

    grammar: what the answer must follow, a text of `grammars.sources`, "" for any text; `params` are then those of a
    form. read: makes a reader of the answer, None where it is nothing but words. extras: what the model is told of each
    token besides its id, see `ScheduledSequence.extras`. adapter: the name of the one that it is computed with, "" for
    the model alone; adapter_scale: with what that is multiplied. vector: whether the prompt is to become one vector,
    into which so many first tokens, `skipped`, are not pooled.
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

"""Query: a prompt ready for an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from .batch.scheduled import NO_EXTRAS, Extras
from .errors import RequestError
from .requests.params import SamplingParams

if TYPE_CHECKING:  # completing a plain text needs no reader
    from .reading.answer import MakeReader

Adapters = str | Sequence[str | None] | None  # one adapter's name for all prompts, or one per prompt; None: no adapter
READ_ONLY = SamplingParams(max_tokens=1)  # for prompts that are read but not answered


class Query(msgspec.Struct, frozen=True):
    """A prompt made by Prompting, for the library and the server.

    grammar: a text of `grammars.sources` that the answer must follow, "" for any text. read: makes a reader of the
    answer; None if that is plain text. extras: inputs per token besides ids, see `ScheduledSequence.extras`. adapter:
    an adapter's name, "" for none; adapter_scale: its factor. vector: whether a vector is wanted, to which the first
    `skipped` tokens do not count.
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
    """The queries with adapters at this scale. adapter: one name for all, or one per query; None: the queries are
    unchanged. RequestError if the number of names differs, or if a value is no name."""
    if adapter is None:
        return queries
    if not isinstance(adapter, Sequence):
        raise RequestError(f"adapter = {adapter!r}: must be a name, or one for each prompt", field="adapter")
    names = [adapter] * len(queries) if isinstance(adapter, str) else list(adapter)
    if len(names) != len(queries):
        raise RequestError(f"{len(names)} adapters for {len(queries)} prompts", "give one for all", field="adapter")
    named = zip(queries, names, strict=True)
    return [replace(query, adapter=name or "", adapter_scale=scale) for query, name in named]

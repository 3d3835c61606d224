"""How much of a prompt a request asks to keep in the prefix cache, and for how long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from ...prefixes.beginning import common_length
from .requests import ChatRequest, Common

if TYPE_CHECKING:
    from .jobs import Job, Jobs

IN_MEMORY_S = 600.0  # after the last use; OpenAI keeps prefixes for 5 to 10 minutes
RETENTION_S = {"in_memory": IN_MEMORY_S, "in-memory": IN_MEMORY_S, "24h": 86400.0}


def seconds_of(request: Common) -> float:
    """For how many seconds OpenAI's fields ask to keep a prompt; 0: until its blocks are needed."""
    if request.prompt_cache_retention is not None:
        return RETENTION_S[request.prompt_cache_retention]
    return IN_MEMORY_S if request.prompt_cache_key else 0.0


async def kept_until(job: Job, jobs: Jobs, marks: Sequence[tuple[ChatRequest, float]], multiple: int) -> Job:
    """The job of one conversation, with the prefixes to keep: those that it shares with the conversation of each mark,
    for that mark's seconds. multiple: lengths to keep are rounded down to a multiple of so many tokens."""
    [submit] = job.submits
    keep: list[tuple[int, float]] = []
    for other, seconds in marks:
        length = common_length([submit.prompt, await jobs.chat_tokens(other)])
        keep.append((length // multiple * multiple, seconds))
    keep = [one for one in keep if one[0]]
    kept = max((length for length, _ in keep), default=0)
    return replace(job, submits=[msgspec.structs.replace(submit, keep=tuple(keep))], kept=kept)

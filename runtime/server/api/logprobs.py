"""Log-probabilities in the forms of the API's answers."""

from __future__ import annotations

from collections.abc import Iterable

from ...requests.sampler import TokenLogprob
from ..engine.engine_stream import EngineStream
from .jobs import Job
from .model import ServedModel
from .responses import ChatLogprobs, CompletionLogprobs, ContentLogprob, PromptLogprob, TopLogprob


def completion_logprobs(
    model: ServedModel, entries: Iterable[TokenLogprob | int], offset: int, most: int
) -> tuple[CompletionLogprobs, int]:
    """The log-probabilities of a completion's tokens, with at most `most` of the likeliest tokens each, and the offset
    of the next chunk. offset: of this chunk in the text, in characters. An entry that is a bare token id is the first
    token of a prompt, which has no prediction. A token that is part of a character has that character's offset."""
    result = CompletionLogprobs([], [], [], [])
    for entry in entries:
        known = isinstance(entry, TokenLogprob)
        token = entry.token_id if known else entry
        result.tokens.append(model.token_text(token))
        result.token_logprobs.append(entry.logprob if known else None)
        top = {model.token_text(one): value for one, value in reversed(entry.top[:most])} if known else None
        result.top_logprobs.append(top)
        raw = model.token_bytes(token)
        continued = bool(raw) and raw[0] & 0xC0 == 0x80
        result.text_offset.append(offset - continued if offset else 0)
        offset += sum(byte & 0xC0 != 0x80 for byte in raw)
    return result, offset


def chat_logprobs(model: ServedModel, entries: Iterable[TokenLogprob]) -> ChatLogprobs:
    """The log-probabilities of an answer's tokens. Their joined `bytes` are the answer's text, even if tokens are parts
    of characters."""
    content = []
    for entry in entries:
        top = [TopLogprob(model.token_text(token), value, list(model.token_bytes(token))) for token, value in entry.top]
        text, raw = model.token_text(entry.token_id), list(model.token_bytes(entry.token_id))
        content.append(ContentLogprob(text, entry.logprob, raw, top))
    return ChatLogprobs(content)


def prompt_logprobs(
    model: ServedModel, job: Job, stream: EngineStream, position: int
) -> list[dict[str, PromptLogprob] | None]:
    """The log-probabilities of prompt number `position` of a request, a dict per token; None for the first token, which
    has no prediction."""
    scored, most = stream.prompt_logprobs.get(stream.first_id + position), job.prompt_logprobs
    found: list[dict[str, PromptLogprob] | None] = [None]
    for entry in scored.logprobs if scored else ():
        shown: dict[int, tuple[float, int | None]] = {
            token: (value, rank) for rank, (token, value) in enumerate(entry.top[:most], 1)
        }
        shown.setdefault(entry.token_id, (entry.logprob, None))
        found.append({str(t): PromptLogprob(value, rank, model.token_text(t)) for t, (value, rank) in shown.items()})
    return found

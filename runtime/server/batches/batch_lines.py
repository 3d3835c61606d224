"""One line of a batch: a request in, a result out. Shared by the Batch API and `icc batch`."""

from __future__ import annotations

import asyncio
import secrets
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Raw, Struct

from ..api.answers import ChatAnswer, CompletionAnswer
from ..api.decoding import decoded
from ..api.embeddings import embedding_answer
from ..api.errors import as_http
from ..api.generate import Generator, whole_answer
from ..api.jobs import Jobs
from ..api.requests import ChatRequest, CompletionRequest, EmbeddingRequest
from ..engine.admission import Overloaded
from ..engine.engine_stream import EngineFailed

ENDPOINTS = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/v1/embeddings": EmbeddingRequest,
}
PRIORITY = 100  # after all requests of waiting clients
_AGAIN_S = 0.25
_DEATHS = 2  # engine crashes per line
MAX_LINES = 50_000


class BatchLine(Struct, forbid_unknown_fields=True):
    """A line of an input file."""

    custom_id: Annotated[str, Meta(min_length=1, max_length=256)]
    url: str
    body: Raw
    method: Literal["POST"] = "POST"


class LineResponse(Struct):
    """The answer to a line's request."""

    status_code: int
    request_id: str
    body: Raw


class LineResult(Struct):
    """A line of an output file."""

    id: str
    custom_id: str
    response: LineResponse
    error: None = None


def read_lines(content: bytes, endpoint: str | None = None) -> tuple[list[BatchLine], list[tuple[int, str]]]:
    """The lines of an input file, and (line number from 1, reason) for each wrong line. endpoint: the `url` that all
    lines must have, None for any."""
    lines: list[BatchLine] = []
    wrong: list[tuple[int, str]] = []
    seen: set[str] = set()
    for number, text in enumerate(content.splitlines(), 1):
        if not text.strip():
            continue
        try:
            line = msgspec.json.decode(text, type=BatchLine)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            wrong.append((number, f"no request: {error}"[:300]))
            continue
        line.body = line.body.copy()
        if line.url not in ENDPOINTS or (endpoint is not None and line.url != endpoint):
            wrong.append((number, f"url must be {endpoint or ' or '.join(ENDPOINTS)}"))
        elif line.custom_id in seen:
            wrong.append((number, f"custom_id {line.custom_id!r} is there twice"))
        else:
            seen.add(line.custom_id)
            lines.append(line)
    if not lines and not wrong:
        wrong.append((1, "the file holds no requests"))
    if len(lines) > MAX_LINES:
        wrong.append((MAX_LINES + 1, f"more than {MAX_LINES} requests"))
    return lines, wrong


async def run_line(jobs: Jobs, generator: Generator, client: str, line: BatchLine) -> tuple[int, bytes]:
    """The HTTP status and the result of a line. Waits while the queue is full or no engine is ready; a line during
    which the engine has died _DEATHS times gets that error."""
    deaths = 0
    while True:
        try:
            status, body = 200, msgspec.json.encode(await _answer(jobs, generator, client, line))
            break
        except Overloaded:
            await asyncio.sleep(_AGAIN_S)
        except EngineFailed as error:
            deaths += error.began
            if error.status != 503 or deaths >= _DEATHS:
                status, body = error.status, msgspec.json.encode(as_http(error).body())
                break
            await asyncio.sleep(_AGAIN_S)
        except Exception as error:
            found = as_http(error)
            status, body = found.status, msgspec.json.encode(found.body())
            break
    name = secrets.token_hex(12)
    response = LineResponse(status, f"req_{name}", Raw(body))
    return status, msgspec.json.encode(LineResult(f"batch_req_{name}", line.custom_id, response))


async def _answer(jobs: Jobs, generator: Generator, client: str, line: BatchLine) -> msgspec.Struct | Raw:
    model, request = jobs.model, jobs.named(decoded(bytes(line.body), ENDPOINTS[line.url]))
    model.check_task("embed" if isinstance(request, EmbeddingRequest) else "generate")
    if isinstance(request, EmbeddingRequest):
        embedding = msgspec.structs.replace(request, priority=PRIORITY)
        return Raw(await embedding_answer(generator, await jobs.embedding(embedding, client), embedding))
    request = msgspec.structs.replace(request, priority=PRIORITY, stream=False)
    if isinstance(request, ChatRequest):
        chat = request
        job = await jobs.chat(chat, client)
        return await whole_answer(generator, job, lambda stream: ChatAnswer(model, chat, job, stream))
    completion = request
    job = await jobs.completion(completion, client)
    return await whole_answer(generator, job, lambda stream: CompletionAnswer(model, completion, job, stream))

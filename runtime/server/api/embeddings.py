"""The answer of /v1/embeddings."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Callable

import msgspec
import numpy as np

from ...requests.embedding import shortened
from ..engine.engine_stream import EngineStream
from .errors import HttpError
from .generate import Generator
from .jobs import Job
from .requests import EmbeddingRequest
from .responses import EmbeddingList, EmbeddingUsage, Vector

_encoder = msgspec.json.Encoder()


async def embedding_answer(generator: Generator, job: Job, request: EmbeddingRequest) -> bytes:
    """The vectors of a job in JSON, encoded one by one, so that the event loop runs between them.

    HttpError 504 if the deadline came first.
    """
    vectors = []
    async for raw in vectors_of(generator, job):
        vectors.append(msgspec.Raw(_encoder.encode(_vector(raw, len(vectors), request))))
        await asyncio.sleep(0)
    usage = EmbeddingUsage(job.prompt_tokens, job.prompt_tokens)
    return _encoder.encode(EmbeddingList(vectors, request.model, usage))  # type: ignore[arg-type]


async def vectors_of(
    generator: Generator, job: Job, sent: Callable[[EngineStream], None] = lambda stream: None
) -> AsyncIterator[bytes]:
    """The vectors of a job's prompts, each as the bytes of float32 values, in order, once all are computed. sent:
    called once the job was sent to the engine. HttpError 504 if the deadline came first."""
    with generator.started(job) as run:
        sent(run.stream)
        async for _ in run.deltas():
            pass
        if "deadline" in run.reasons:
            raise HttpError(504, "the deadline has passed", code="deadline")
        for submit_id in run.stream.ids:
            yield run.stream.embeddings.pop(submit_id)


def _vector(raw: bytes, index: int, request: EmbeddingRequest) -> Vector:
    """The vector in the requested form. A vector cut to fewer dimensions is scaled to length 1, as OpenAI's are."""
    vector = shortened(np.frombuffer(raw, dtype="<f4"), request.dimensions)
    if request.encoding_format == "base64":
        return Vector(index, base64.b64encode(vector.tobytes()).decode())
    return Vector(index, vector.tolist())

"""The answers of /api/embed and /api/embeddings."""

from __future__ import annotations

import asyncio
import time

import msgspec
import numpy as np
from msgspec import Raw, Struct

from ....requests.embedding import shortened
from ....requests.tail import scaled
from ..embeddings import vectors_of
from ..generate import Generator
from ..jobs import Job
from ..requests import EmbeddingRequest

_encoder = msgspec.json.Encoder()


class OllamaEmbedded(Struct):
    """Answer of /api/embed: a vector of length 1 for each text. Durations in nanoseconds."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbedding(Struct):
    """Answer of /api/embeddings: the vector as the model computes it."""

    embedding: list[float]


async def embed_answer(generator: Generator, job: Job, request: EmbeddingRequest) -> bytes:
    """The vectors of a job in JSON, encoded one by one, so that the event loop runs between them. HttpError 504 if the
    deadline came first."""
    began = time.monotonic_ns()
    vectors: list[Raw] = []
    async for raw in vectors_of(generator, job):
        vector = scaled(shortened(np.frombuffer(raw, dtype="<f4"), request.dimensions))
        vectors.append(Raw(_encoder.encode(vector.tolist())))
        await asyncio.sleep(0)
    total = time.monotonic_ns() - began
    return _encoder.encode(OllamaEmbedded(request.model, vectors, total, 0, job.prompt_tokens))  # type: ignore[arg-type]


async def embedding_answer(generator: Generator, job: Job) -> bytes:
    """The vector of a job of one text in JSON. HttpError 504 if the deadline came first."""
    [raw] = [raw async for raw in vectors_of(generator, job)]
    return _encoder.encode(OllamaEmbedding(np.frombuffer(raw, dtype="<f4").tolist()))

"""The answer of /v1/rerank."""

from __future__ import annotations

from uuid import uuid4

import msgspec
import numpy as np
from msgspec import UNSET

from ...format.manifest import EmbeddingFacts
from ...requests.embedding import ranked
from .embeddings import vectors_of
from .generate import Generator
from .jobs import Job
from .requests import RerankRequest
from .responses import EmbeddingUsage, RankedDocument, RankedText, Reranked


async def rerank_answer(generator: Generator, job: Job, request: RerankRequest, facts: EmbeddingFacts) -> bytes:
    """The documents of a job in JSON, the best first. HttpError 504 if the deadline came first."""
    vectors = [np.frombuffer(raw, dtype="<f4") async for raw in vectors_of(generator, job)]
    found = ranked(request.texts, vectors, facts)
    results = [
        RankedDocument(one.index, one.score, UNSET if request.return_documents is False else RankedText(one.document))
        for one in found[: request.top_n or len(found)]
    ]
    usage = EmbeddingUsage(job.prompt_tokens, job.prompt_tokens)
    return msgspec.json.encode(Reranked(f"rerank-{uuid4().hex}", request.model, usage, results))

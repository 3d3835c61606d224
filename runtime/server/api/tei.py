"""Requests and answers of text-embeddings-inference, for its clients (LlamaIndex, LangChain)."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import UNSET, Meta, Struct, UnsetType

from ...format.manifest import EmbeddingFacts
from ...requests.embedding import ranked, shortened
from ...requests.tail import scaled
from . import limits
from .embeddings import vectors_of
from .errors import HttpError
from .generate import Generator
from .jobs import Job
from .requests import EmbeddingRequest, RerankRequest, Text

Side = Literal["Left", "Right", "left", "right"]


class EmbedRequest(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """POST /embed."""

    inputs: str | list[str | int | list[int]]
    normalize: bool = True
    truncate: bool | None = False
    truncation_direction: Side = "Right"
    prompt_name: str | None = None
    dimensions: Annotated[int, limits.bound("dimensions")] | None = None

    def plain(self, model: str) -> EmbeddingRequest:
        """This request as one of /v1/embeddings."""
        cut = "START" if self.truncation_direction.lower() == "left" else "END"
        return EmbeddingRequest(
            model=model,
            input=self.inputs,
            prompt_name=self.prompt_name,
            dimensions=self.dimensions,
            truncate=cut if self.truncate else None,  # type: ignore[arg-type]
        )


class TextsRequest(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """POST /rerank with `texts` instead of documents. raw_scores: whether scores are the model's logits, or else within
    0..1."""

    query: Text
    texts: Annotated[list[Text], Meta(min_length=1, max_length=limits.INPUTS)]
    raw_scores: bool = False
    return_text: bool = False
    truncate: bool | None = False
    truncation_direction: Side = "Right"

    def plain(self, model: str) -> RerankRequest:
        """This request as one of /v1/rerank."""
        cut = -1 if self.truncate else None
        return RerankRequest(model=model, query=self.query, documents=list(self.texts), truncate_prompt_tokens=cut)


class Rank(Struct):
    """The score of text number `index`."""

    index: int
    score: float
    text: str | UnsetType = UNSET


def has_texts(body: bytes) -> bool:
    """Whether the body of /rerank is a TextsRequest."""
    try:
        return "texts" in msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except msgspec.MsgspecError:
        return False


async def vectors_answer(generator: Generator, job: Job, request: EmbedRequest, facts: EmbeddingFacts) -> bytes:
    """The vectors of a job as a JSON array of arrays. HttpError 400 for normalize: false if the model normalizes."""
    if facts.normalize and not request.normalize:
        raise HttpError(400, "normalize: false is not possible: the model's vectors have length 1", "normalize")
    found = [np.frombuffer(raw, dtype="<f4") async for raw in vectors_of(generator, job)]
    vectors = [shortened(vector, request.dimensions) for vector in found]
    return msgspec.json.encode([(scaled(v) if request.normalize else v).tolist() for v in vectors])


async def ranks_answer(generator: Generator, job: Job, request: TextsRequest, facts: EmbeddingFacts) -> bytes:
    """The texts of a job in JSON, the best first."""
    vectors = [np.frombuffer(raw, dtype="<f4") async for raw in vectors_of(generator, job)]
    kind: Literal["sigmoid", "identity"] = "identity" if request.raw_scores else "sigmoid"
    found = ranked(request.texts, vectors, msgspec.structs.replace(facts, scores=kind))
    return msgspec.json.encode([Rank(r.index, r.score, r.document if request.return_text else UNSET) for r in found])


for _kind in (EmbedRequest, TextsRequest):  # see the end of requests.py
    msgspec.json.Decoder(_kind)

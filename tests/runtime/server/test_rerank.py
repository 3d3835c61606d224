"""/v1/rerank of an engine that scores: the toy, whose last row is 10 at the byte after the document's last byte."""

from __future__ import annotations

from collections.abc import Callable
from math import exp
from pathlib import Path

import pytest
from icc.runtime.format.manifest import EmbeddingFacts

from .conftest import StartServer

BEST = "ends with a zero \0"  # its last row is 10 at index 1, the second label
GOOD = 1 / (1 + exp(-10))


def test_documents_come_by_their_scores(write_engine: Callable[..., Path], start: StartServer, tmp_path: Path) -> None:
    facts = EmbeddingFacts("last", False, 258, scores="sigmoid")
    engine = write_engine(tmp_path / "toy.engine", embedding=facts, max_seq_len=64, max_step_tokens=16)
    server = start(engine=engine)
    body = {"model": "toy", "query": "q", "documents": ["one", BEST, {"text": "three"}]}
    for path in ("/v1/rerank", "/rerank", "/v2/rerank"):
        answer = server.ask("POST", path, body).json
        assert [(one["index"], one["document"]["text"]) for one in answer["results"]] == [
            (1, BEST), (0, "one"), (2, "three"),
        ]  # fmt: skip
        assert [one["relevance_score"] for one in answer["results"]] == pytest.approx([GOOD, 0.5, 0.5])
    assert answer["usage"]["total_tokens"] == 3 + len("one" + BEST + "three") and answer["model"] == "toy"
    [one] = server.ask("POST", "/v1/rerank", body | {"top_n": 1, "return_documents": False}).json["results"]
    assert one == {"index": 1, "relevance_score": pytest.approx(GOOD)}
    texts = {"query": "q", "texts": ["one", BEST]}  # the form of text-embeddings-inference
    assert server.ask("POST", "/rerank", texts).json == [
        {"index": 1, "score": pytest.approx(GOOD)}, {"index": 0, "score": 0.5},
    ]  # fmt: skip
    raw = server.ask("POST", "/rerank", texts | {"raw_scores": True, "return_text": True, "truncate": True}).json
    assert raw[0] == {"index": 1, "score": pytest.approx(10), "text": BEST}
    wrong = server.ask("POST", "/rerank", texts | {"texts": "one"})
    assert wrong.status == 400 and wrong.json["error"]["param"] == "texts"
    long = {"documents": ["a" * 70]}
    refused = server.ask("POST", "/v1/rerank", body | long)
    assert refused.status == 400 and refused.json["error"]["param"] == "documents"
    assert server.ask("POST", "/v1/rerank", body | long | {"truncate_prompt_tokens": -1}).status == 200
    assert server.ask("POST", "/v1/rerank", body | {"documents": []}).status == 400
    for path in ("/v1/embeddings", "/v1/completions"):
        reply = server.ask("POST", path, {"model": "toy", "input": "a"})
        assert reply.status == 404 and "compiled to score texts" in reply.json["error"]["message"]


def test_types_reach_the_engine(write_engine: Callable[..., Path], start: StartServer, tmp_path: Path) -> None:
    """The toy has no input for token types, so that it refuses the request."""
    facts = EmbeddingFacts("last", False, 258, scores="sigmoid", types_input="kind")
    engine = write_engine(tmp_path / "toy.engine", embedding=facts, max_seq_len=64, max_step_tokens=16)
    refused = start(engine=engine).ask("POST", "/v1/rerank", {"model": "toy", "query": "q", "documents": ["one"]})
    assert refused.status == 400
    assert "the engine has no input 'kind': it takes none" in refused.json["error"]["message"]

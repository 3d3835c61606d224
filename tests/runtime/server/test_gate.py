"""The checks in front of the routes, and the sampling defaults of requests; in this process."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from icc.runtime.format.manifest import SamplingDefaults
from icc.runtime.server.api import limits
from icc.runtime.server.api.decoding import decoded
from icc.runtime.server.api.errors import HttpError
from icc.runtime.server.api.gate import RequestGate
from icc.runtime.server.api.jobs import Jobs
from icc.runtime.server.api.keys import ApiKeys
from icc.runtime.server.api.metrics import Metrics
from icc.runtime.server.api.model import open_model
from icc.runtime.server.api.requests import CompletionRequest
from icc.runtime.server.api.sandbox import Sandbox
from icc.runtime.server.engine.admission import Admission, Budget
from icc.runtime.server.http.access import AccessLog
from icc.runtime.server.http.gate import ClientGate
from icc.runtime.server.http.http_protocol import HttpProtocol
from icc.runtime.templates.source import TemplateSource
from starlette.responses import PlainTextResponse
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


def status(gate: ClientGate, path: str, method: str = "GET") -> int:
    """The status of the answer to a request without a body."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b""}

    scope = {"type": "http", "path": path, "method": method, "headers": [], "query_string": b""}
    asyncio.run(gate(scope, receive, send))
    return sent[0]["status"]


def test_a_server_that_drains_lives_and_is_not_ready() -> None:
    admission = Admission(Budget(sequences=4, tokens=100))
    opened = RequestGate(ApiKeys(), admission)
    gate = ClientGate(PlainTextResponse("ok"), opened, Metrics("m"))
    paths = ("/live", "/metrics", "/version", "/ready", "/health", "/v1/models")
    assert [status(gate, path) for path in paths] == [200] * 6
    opened.draining = True
    assert [status(gate, path) for path in paths] == [200] * 3 + [503] * 3
    assert status(gate, "/v1/completions", "POST") == 503


@pytest.mark.parametrize(
    ("own", "fields", "expected"), [(None, {}, 1.0), (0.3, {}, 0.3), (0.3, {"temperature": 0}, 0.0)]
)
def test_the_default_temperature_is_the_model_s_or_one(
    make_engine: Callable[..., Path], own: float | None, fields: dict[str, Any], expected: float
) -> None:
    model = open_model(make_engine(sampling=SamplingDefaults(temperature=own)))
    jobs = Jobs(model, Sandbox(TemplateSource("", {})), ApiKeys())
    request = decoded(json.dumps({"model": model.name, "prompt": "a", **fields}).encode(), CompletionRequest)
    [submit] = asyncio.run(jobs.completion(request, "")).submits
    assert submit.params.temperature == expected


KEYS = ApiKeys(["the-first-key", "the-second-key"])


def test_of_two_keys_none_is_taken() -> None:
    """A request with two keys is refused: a proxy may check one, and this server the other."""
    gate = RequestGate(KEYS, Admission(Budget(sequences=4, tokens=100)))
    assert gate.client(["Bearer the-first-key"], []) == gate.client([], ["the-first-key"])
    for authorization, api_key in (
        (["Bearer the-first-key", "Bearer nothing"], []),
        (["Bearer the-first-key"], ["the-first-key"]),
        ([], ["the-first-key", "the-second-key"]),
        ([], []),
    ):
        with pytest.raises(HttpError) as refused:
            gate.client(authorization, api_key)
        assert refused.value.status == 401


def test_every_key_of_the_file_is_accepted_and_none_beside_them() -> None:
    clients = [KEYS.client(b"Bearer " + key) for key in (b"the-first-key", b"the-second-key", b"the-first-ke", b"")]
    assert clients[0] and clients[1] and clients[0] != clients[1] and clients[2:] == [None, None]


@pytest.mark.parametrize(
    ("count", "size", "refused"),
    [(limits.HEADERS, 10, False), (limits.HEADERS + 1, 10, True), (1, limits.HEADER_BYTES, True)],
)
def test_headers_are_bounded_by_number_and_by_size(
    count: int, size: int, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(HttpToolsProtocol, "on_headers_complete", lambda self: said.append("taken"))
    monkeypatch.setattr(HttpProtocol, "_refuse", lambda self: said.append("refused"))
    protocol = HttpProtocol.__new__(HttpProtocol)
    protocol.url, protocol.headers, protocol.cycle = b"/v1/completions", [(b"a", b"b" * size)] * count, None
    protocol.on_headers_complete()
    assert said == ["refused" if refused else "taken"]


@pytest.mark.parametrize(
    ("given", "kept"),
    [("abc-1", True), ("a b", False), ("a\x7f", False), ("", False), ("a" * 128, True), ("a" * 129, False)],
)
def test_the_id_of_a_request_is_one_word(given: str, kept: bool) -> None:
    """Other ids are replaced, as an id appears in the log and in the answer."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"x-request-id", given.encode())]
    scope = {"type": "http", "path": "/live", "method": "GET", "headers": headers, "query_string": b""}
    asyncio.run(AccessLog(PlainTextResponse("ok"))(scope, None, send))  # type: ignore[arg-type]
    answered = dict(sent[0]["headers"])[b"x-request-id"].decode()
    assert answered == given if kept else re.fullmatch(r"[0-9a-f]{32}", answered)

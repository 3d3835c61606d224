"""What stands before the routes, and what a request that says nothing is sampled with; in this process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from icc.runtime.format.manifest import SamplingDefaults
from icc.runtime.server.api.decoding import decoded
from icc.runtime.server.api.gate import RequestGate
from icc.runtime.server.api.jobs import Jobs
from icc.runtime.server.api.keys import ApiKeys
from icc.runtime.server.api.metrics import Metrics
from icc.runtime.server.api.model import open_model
from icc.runtime.server.api.requests import CompletionRequest
from icc.runtime.server.api.sandbox import Sandbox
from icc.runtime.server.engine.admission import Admission, Budget
from icc.runtime.server.http.gate import ClientGate
from icc.runtime.templates.source import TemplateSource
from starlette.responses import PlainTextResponse


def status(gate: ClientGate, path: str, method: str = "GET") -> int:
    """What a request without a body is answered with."""
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

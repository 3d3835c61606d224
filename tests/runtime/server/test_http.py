"""HTTP around the API: the log, request ids, model names, HTTPS, pages of other origins, proxies."""

from __future__ import annotations

import datetime
import http.client
import json
import logging
import re
import socket
import ssl
import subprocess
from pathlib import Path

import pytest
from icc.runtime.errors import UsageError
from icc.runtime.server.http.serve import check_certificate
from icc.runtime.server.http.served import root_path
from icc.runtime.server.log import LineFormatter, LogOptions, RequestContext, current_request, with_fields

from .conftest import Served, StartServer

PAGE = "https://app.example"


def lines(server: Served, message: str) -> list[dict]:
    found = [json.loads(line) for line in server.log.read_text().splitlines()]
    return [line for line in found if line["message"] == message]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tls")
    key, certificate = folder / "key.pem", folder / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
    subprocess.run([*command, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    return certificate, key


def test_all_that_stands_around_the_api(start: StartServer, certificate: tuple[Path, Path]) -> None:
    """One server with every option; each option is checked separately."""
    cert, key = certificate
    server = start(
        "--served-model-name", "one,two", "--cors-origin", PAGE, "--root-path", "/llm", "--vllm-metrics",
        "--ssl-certfile", str(cert), "--ssl-keyfile", str(key), "--log-format", "json", "--log-level", "debug",
    )  # fmt: skip

    def ask(method: str, path: str, body=None, **headers: str) -> tuple[http.client.HTTPResponse, bytes]:
        trusted = ssl.create_default_context(cafile=str(cert))
        trusted.check_hostname = False
        connection = http.client.HTTPSConnection("127.0.0.1", server.port, timeout=60, context=trusted)
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        response = connection.getresponse()
        return response, response.read()

    # model names: the answer has the name of the request
    listed = json.loads(ask("GET", "/v1/models")[1])["data"]
    assert [model["id"] for model in listed] == ["one", "two"]
    for name in ("one", "two"):
        answer = json.loads(ask("POST", "/v1/completions", {"model": name, "prompt": "a", "max_tokens": 2})[1])
        assert answer["model"] == name and answer["choices"][0]["text"] == "bc"
    assert ask("POST", "/v1/completions", {"model": "toy", "prompt": "a"})[0].status == 404

    # behind a proxy: paths with and without its prefix
    for path in ("/llm/v1/models", "/v1/models", "/llm/live"):
        assert ask("GET", path)[0].status == 200
    assert json.loads(ask("GET", "/llm/openapi.json")[1])["servers"][0]["url"] == "/llm"

    # pages of other origins: only the allowed one, for errors too
    preflight, _ = ask("OPTIONS", "/v1/completions", Origin=PAGE, Access_Control_Request_Method="POST")
    assert preflight.status == 200 and preflight.headers["access-control-allow-origin"] == PAGE
    assert ask("GET", "/nothing", Origin=PAGE)[0].headers["access-control-allow-origin"] == PAGE
    assert "access-control-allow-origin" not in ask("GET", "/v1/models", Origin="https://other.example")[0].headers

    # request ids: the caller's or a new one; each request has a line in the log
    response, _ = ask("POST", "/v1/completions", {"model": "one", "prompt": "a", "max_tokens": 3}, X_Request_Id="abc-1")
    assert response.headers["x-request-id"] == "abc-1"
    made_up = ask("GET", "/v1/models", X_Request_Id="not an id")[0].headers["x-request-id"]
    assert re.fullmatch(r"[0-9a-f]{32}", made_up)
    server.wait_until(lambda: any(line.get("request_id") == made_up for line in lines(server, "request")))
    [line] = [line for line in lines(server, "request") if line["request_id"] == "abc-1"]
    assert (line["method"], line["path"], line["status"]) == ("POST", "/v1/completions", 200)
    assert line["prompt_tokens"] == 1 and line["output_tokens"] == 3 and line["ms"] >= line["first_ms"] > 0
    assert datetime.datetime.fromisoformat(line["time"]).tzinfo is not None
    assert [line["level"] for line in lines(server, "request") if line["path"] == "/live"] == ["debug"]
    assert b"\nvllm:generation_tokens_total{" in ask("GET", "/metrics")[1]


def test_the_log_says_when_the_engine_is_started_again(start_faulty: StartServer) -> None:
    server = start_faulty("exit")
    reply = server.ask("POST", "/v1/completions", {"model": "toy", "prompt": "KLM", "max_tokens": 9})
    assert reply.status >= 500
    server.wait_until(lambda: server.log.read_text().count("the engine is ready") == 2)
    text = server.log.read_text()
    [died] = [line for line in text.splitlines() if "is started again" in line]
    assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z ERROR ", died) and "prompts_lost=1" in died
    assert "restarts=1" in text.splitlines()[-1] or "restarts=1" in text


def test_a_line_is_one_line_whatever_is_in_it() -> None:
    record = logging.LogRecord("icc.serve", logging.INFO, "", 0, "a\nb \x1b[31m", (), None)
    record.__dict__ |= with_fields(path='/x" y\r\n', status=200)
    text = LineFormatter(LogOptions()).format(record)
    assert "\n" not in text and "\x1b" not in text and "status=200" in text and r"a\x0ab" in text
    current_request.set(RequestContext("id-1"))
    line = json.loads(LineFormatter(LogOptions("json")).format(record))
    assert line["message"] == "a\nb \x1b[31m" and line["request_id"] == "id-1" and line["path"] == '/x" y\r\n'
    current_request.set(None)


def test_what_cannot_be_served_is_said_at_once(tmp_path: Path, certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    check_certificate(cert, key)
    (tmp_path / "bad.pem").write_text("nothing")
    for pair in ((tmp_path / "missing.pem", key), (cert, tmp_path / "bad.pem"), (cert, None), (None, key)):
        with pytest.raises(UsageError):
            check_certificate(*pair)
    assert [root_path(given) for given in ("", "/", "llm", "/a/b/")] == ["", "", "/llm", "/a/b"]
    with pytest.raises(UsageError):
        root_path("/a b")


def test_a_request_is_a_span_with_its_phases() -> None:
    from types import SimpleNamespace

    from icc.runtime.requests.params import SamplingParams
    from icc.runtime.server.api.tracing import Tracer
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    tracer = Tracer("toy", exporter)
    job = SimpleNamespace(prompt_tokens=3, submits=[SimpleNamespace(params=SamplingParams(max_tokens=4))])
    run = SimpleNamespace(
        job=job, started=10.0, queued_s=1.0, first=13.0, last=15.0, output_tokens=4, reasons=["length"], reason=None
    )
    trace, parent = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    current_request.set(RequestContext("id-1", f"00-{trace}-{parent}-01"))
    tracer.request_ended(run)  # type: ignore[arg-type]
    current_request.set(None)
    tracer.close()
    *phases, request = exporter.get_finished_spans()
    assert request.name == "llm_request" and f"{request.context.trace_id:032x}" == trace
    assert f"{request.parent.span_id:016x}" == parent and request.attributes["gen_ai.usage.output_tokens"] == 4
    assert request.attributes["icc.request_id"] == "id-1"
    seconds = {span.name: round((span.end_time - span.start_time) / 1e9, 3) for span in phases}
    assert seconds == {"queue": 1.0, "prefill": 2.0, "decode": 2.0}
    assert all(span.parent.span_id == request.context.span_id for span in phases)


@pytest.mark.usefixtures("idle_after")
@pytest.mark.parametrize("streamed", [True, False])
def test_answers_to_http_1_0_have_no_chunks(served: Served, streamed: bool) -> None:
    """The connection ends after a body whose length is not known in advance."""
    body = json.dumps({"prompt": "a", "max_tokens": 3, "stream": streamed}).encode()
    head = f"POST /v1/completions HTTP/1.0\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", served.port), timeout=60) as client:
        client.sendall(head + body)
        answer = b"".join(iter(lambda: client.recv(65536), b""))
    headers, _, content = answer.partition(b"\r\n\r\n")
    assert headers.startswith(b"HTTP/1.1 200") and b"transfer-encoding" not in headers.lower()
    assert (b"content-length" in headers.lower()) is not streamed
    assert content.startswith(b"data: {") and content.endswith(b"data: [DONE]\n\n") if streamed else json.loads(content)

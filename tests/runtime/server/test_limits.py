"""RELIABILITY S6: every number has a bound; the validator, the OpenAPI document and this test read one table."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from icc.runtime.errors import IccError
from icc.runtime.nesting import JSON_DEPTH, depth
from icc.runtime.server.api import limits
from icc.runtime.server.engine.admission import Admission, Budget, Overloaded, Price, TooExpensive

from .conftest import Served

pytestmark = pytest.mark.usefixtures("idle_after")
IN_CHAT = ("max_completion_tokens", "top_logprobs")
IN_OPTIONS = ("num_predict", "repeat_last_n")  # of Ollama's API
# test_embeddings.py, test_rerank.py, test_ollama.py; beams are n or best_of in requests
ELSEWHERE = {"logit_bias", "dimensions", "top_n", "num_ctx", "beams"}
NUMBERS = sorted(set(limits.NUMBERS) - ELSEWHERE)


def send(served: Served, name: str, value: str) -> tuple[int, Any]:
    """The status and the JSON answer of a request whose field `name` is the JSON text `value`."""
    if name in IN_OPTIONS:
        options = f'{{"{name}": {value}, "stop": ["b"]}}'
        body = f'{{"model": "toy", "prompt": "a", "raw": true, "stream": false, "options": {options}}}'
        reply = served.ask("POST", "/api/generate", body.encode())
        return reply.status, reply.json
    path = "/v1/chat/completions" if name in IN_CHAT else "/v1/completions"
    prompt = '"messages": [{"role": "user", "content": "a"}]' if name in IN_CHAT else '"prompt": "a"'
    limit = "" if "max_" in name else '"max_tokens": 2, '
    with_it = '"use_beam_search": true, "n": 2, ' if name == "length_penalty" else ""
    field = f'"logit_bias": {{"98": {value}}}' if name == "logit_bias" else f'{with_it}"{name}": {value}'
    stop = '"stop_token_ids": [98, 11], '  # the toy says these soon: even a long answer is short
    reply = served.ask("POST", path, f'{{"model": "toy", {prompt}, {limit}{stop}{field}}}'.encode())
    return reply.status, reply.json


def one_less(name: str, value: float) -> float:
    return int(value) - 1 if name in limits.WHOLE else value - 0.001


def one_more(name: str, value: float) -> float:
    return int(value) + 1 if name in limits.WHOLE else value * 1.001 + 0.001


@pytest.mark.parametrize("name", [*NUMBERS, "logit_bias"])
def test_numbers_are_taken_up_to_their_bounds_and_not_beyond(served: Served, name: str) -> None:
    low, high = limits.NUMBERS[name]
    high = min(high, 2**63 - 1)
    as_json = int if name in limits.WHOLE else float
    for value in (low, high):
        status, answer = send(served, name, json.dumps(as_json(value)))
        assert status == 200, (value, answer)
    beyond = [one_less(name, low), one_more(name, high), 1e308, -1e308]
    wrong = [json.dumps(value) for value in beyond] + ["NaN", "1e999", '"1"', "[]", "{}", "9" * 400, "-", "true"]
    for text in wrong:
        status, answer = send(served, name, text)
        assert status == 400 and answer["error"], (text, status)


@pytest.mark.parametrize("name", NUMBERS)
def test_the_document_says_the_same_bounds(served: Served, name: str) -> None:
    schemas = json.loads(served.ask("GET", "/openapi.json").raw)["components"]["schemas"]
    kind = "ChatRequest" if name in IN_CHAT else "OllamaOptions" if name in IN_OPTIONS else "CompletionRequest"
    schema = schemas[kind]["properties"][name]
    number = next(part for part in schema.get("anyOf", [schema]) if "minimum" in part)
    low, high = limits.NUMBERS[name]
    assert number["minimum"] == low and number["maximum"] == min(high, 2**63 - 1)


@pytest.mark.parametrize(
    ("field", "most"),
    [
        ("stop", ["x"] * limits.STOPS),
        ("stop", "x" * limits.STOP_CHARS),
        ("stop", "\U0001f600" * limits.STOP_CHARS),
        ("stop_token_ids", [98] * limits.STOP_IDS),
        ("logit_bias", {f"{i % 200:0{3 + i // 200}d}": 0 for i in range(limits.BIASES)}),  # for 200 tokens
        ("prompt", ["a"] * limits.PROMPTS),
        ("cache_salt", "x" * 256),
    ],
)
def test_lists_and_texts_are_taken_up_to_their_bounds(served: Served, field: str, most: Any) -> None:
    body = {"model": "toy", "prompt": "a", "max_tokens": 1}
    assert served.ask("POST", "/v1/completions", {**body, field: most}).status == 200
    more = most + most[:1] if isinstance(most, list | str) else {**most, str(len(most)): 0}
    assert served.ask("POST", "/v1/completions", {**body, field: more}).status == 400


def test_a_body_has_a_size(served: Served) -> None:
    body = b'{"model": "toy", "prompt": "%s"}' % (b"a" * limits.BODY_BYTES)
    assert served.ask("POST", "/v1/completions", body).json["error"]["code"] == "body_too_large"
    whole = b'{"model": "toy", "prompt": "a", "user": "'
    whole += b"u" * (limits.BODY_BYTES - len(whole) - 20) + b'", "max_tokens": 1}'
    assert served.ask("POST", "/v1/completions", whole).status == 200


def test_nesting_is_bounded(served: Served) -> None:
    def nested(levels: int) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "null"}
        for _ in range(levels):
            schema = {"not": schema}
        return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}

    body = {"model": "toy", "prompt": "a", "response_format": nested(JSON_DEPTH)}
    assert "nested deeper" in served.ask("POST", "/v1/completions", body).json["error"]["message"]
    assert depth({"a": [[1], {}]}) == 3 and depth(1) == 0


def test_a_price_counts_everything_that_a_request_may_take() -> None:
    assert Price.of([3, 5], n=2, max_tokens=10, logprobs=None) == Price(4, 56, 0)
    assert Price.of([3], n=1, max_tokens=10, logprobs=4).bytes == 100 * 13 * 5


def test_admission_is_bounded_by_count_by_tokens_and_by_bytes() -> None:
    admission = Admission(Budget(sequences=4, tokens=100, answer_bytes=1000))

    def refused(price: Price) -> type[IccError] | None:
        try:
            with admission.admitted(price):
                return None
        except IccError as error:
            return type(error)

    with admission.admitted(Price(3, 60, 0)):
        assert refused(Price(1, 40, 0)) is None
        assert refused(Price(2, 10, 0)) is Overloaded and refused(Price(1, 41, 0)) is Overloaded
        assert refused(Price(5, 1, 0)) is TooExpensive and refused(Price(1, 101, 0)) is TooExpensive
        assert refused(Price(1, 1, 1001)) is TooExpensive
    assert (admission.sequences, admission.tokens, admission.requests) == (0, 0, 0)


def test_admission_is_bounded_by_the_expected_wait() -> None:
    """Sequences run 2 s each, four at a time, so that one ends every half second."""
    admission = Admission(Budget(sequences=100, tokens=1000, wait_s=1.0), slots=lambda: 4)
    with contextlib.ExitStack() as accepted:
        enter = lambda priority=0, count=1: accepted.enter_context(admission.admitted(Price(count, 1, 0), priority))  # noqa: E731
        enter(count=50)  # before a sequence ended, only the count limits the queue
        accepted.pop_all().close()
        for _ in range(200):
            admission.served(2.0)
        enter(count=6)  # accepted, as nothing else waits
        assert admission.wait_s(1) == pytest.approx(1.5)
        with pytest.raises(Overloaded, match="--max-wait"):
            enter()
        with pytest.raises(Overloaded):
            admission.check_room()
        enter(priority=100, count=3)  # batch lines wait without a limit, and delay no other request
        assert admission.wait_s(1) == pytest.approx(1.5)
    assert admission.wait_s(4) == 0 and admission.wait_s(5) == pytest.approx(0.5)
    for _ in range(5):
        accepted.enter_context(admission.admitted(Price(1, 1, 0)))
    for _ in range(200):
        admission.served(0.5)  # the server is faster now: the same wait allows a longer queue
    assert admission.wait_s(1) == pytest.approx(0.25, rel=0.02)
    accepted.close()
    assert admission.sequences == 0 and admission.wait_s(4) == 0

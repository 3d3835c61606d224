"""Routing of requests: the facts that are read from a request, and the replica to which it is sent."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from icc.runtime.ray.asked import AskedOfReplica, read_asked
from icc.runtime.ray.choosing import STATS_S, ReplicaChooser
from icc.runtime.ray.front import RouteApp
from icc.runtime.ray.refused import RefuseChanges
from icc.runtime.server.engine.router import CHUNK

LONG = "a house stands on a hill, and someone looks out of its window. " * 20
SYSTEM = {"role": "system", "content": LONG}


def asked(**fields: Any) -> AskedOfReplica:
    return read_asked(json.dumps(fields).encode())


def shared(one: AskedOfReplica, other: AskedOfReplica) -> int:
    """The number of leading chunks that two prompts share."""
    return sum(a == b for a, b in zip(one.keys, other.keys, strict=False))


def test_a_turn_begins_as_the_turn_before() -> None:
    first = [SYSTEM, {"role": "user", "content": "Who?"}]
    second = [*first, {"role": "assistant", "content": "Nobody. " * 40}, {"role": "user", "content": "Why?" * 80}]
    one, two = asked(model="m", messages=first), asked(model="m", messages=second)
    assert len(one.keys) >= len(LONG) // (4 * CHUNK) and shared(one, two) == len(one.keys)
    assert len(two.keys) > len(one.keys) and two.length == pytest.approx(len(json.dumps(second)) / 4, rel=0.1)
    other = asked(model="m", messages=[{"role": "system", "content": "b" + LONG}, *first[1:]])
    assert shared(one, other) == 0
    written = read_asked(json.dumps({"messages": first, "model": "m"}, indent=2).encode())
    assert written == one


@pytest.mark.parametrize("field", [{"cache_salt": "mine"}, {"model": "adapter"}, {"lora": "adapter"}])
def test_what_shares_no_cache_shares_no_chunk(field: dict[str, str]) -> None:
    plain, own = asked(**{"model": "m", "prompt": LONG}), asked(**{"model": "m", "prompt": LONG, **field})
    assert plain.keys and shared(plain, own) == 0


@pytest.mark.parametrize("name", ["prompt", "input"])
def test_every_api_has_a_prompt(name: str) -> None:
    assert asked(**{name: LONG}).keys == asked(prompt=LONG).keys
    items = asked(**{name: [LONG, "b"]})
    assert items.keys and items.length >= len(LONG) // 4
    tokens = asked(prompt=list(range(100)))
    assert tokens.length == 100 and len(tokens.keys) == 100 // CHUNK
    assert asked(system=LONG, messages=[]).keys == asked(instructions=LONG, input="").keys  # Anthropic; Responses


@pytest.mark.parametrize(
    "body",
    [b"", b"[1]", b"{", b'{"prompt": "cut of', b'{"prompt": 1e999}', b'{"messages": [{}]}', b'{"prompt": [1e30, null]}',
     b'{"prompt": [99999999999999999999]}', b'{"prompt": [4294967296]}', b'{"model": 3}', b"\xff", b"[" * 100_000],
)  # fmt: skip
def test_no_body_ends_the_router(body: bytes) -> None:
    found = read_asked(body)
    assert found.length >= 0 and isinstance(found.model, str)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def stats(**changes: Any) -> dict[str, Any]:
    return {
        "waiting": 0,
        "sequences": 0,
        "slots": 8,
        "usage": 0.0,
        "tokens": 100_000,
        "ready": True,
        "adapters": [],
        **changes,
    }


def test_a_conversation_stays_on_its_replica() -> None:
    clock = Clock()
    chooser = ReplicaChooser[str](["", "m"], clock)
    first = asked(model="m", messages=[SYSTEM])
    assert chooser.ranked(first, {"a": stats(sequences=2), "b": stats()}) == ["b", "a"]
    clock.now += 2 * STATS_S
    again = {"a": stats(), "b": stats(sequences=2)}
    assert chooser.ranked(first, again)[0] == "b"  # two running requests cost less than the prompt
    assert chooser.ranked(asked(model="m", prompt="x" * 4000), again)[0] == "a"
    chooser.forget("b")
    clock.now += 2 * STATS_S
    assert chooser.ranked(first, again)[0] == "a"


def test_what_was_sent_counts_until_the_replica_says_so() -> None:
    clock = Clock()
    chooser = ReplicaChooser[str](["m"], clock)
    idle = {"a": stats(), "b": stats()}
    got = [chooser.ranked(asked(model="m", prompt=f"{number}" * 4000), idle)[0] for number in range(4)]
    assert got == ["a", "b", "a", "b"]
    clock.now += 2 * STATS_S  # the new statistics say that both are idle
    assert chooser.ranked(asked(model="m", prompt="z" * 400), idle)[0] == "a"
    assert chooser.ranked(asked(model="m", prompt="z" * 100), {"a": stats(usage=0.95), "b": stats()})[0] == "b"
    gone = {"a": stats(ready=False), "b": stats(sequences=9, usage=1.0)}
    assert chooser.ranked(asked(model="m", prompt="y"), gone) == ["b", "a"]


def test_an_adapter_is_where_it_is_resident() -> None:
    chooser = ReplicaChooser[str](["m"], Clock())
    both = {"a": stats(), "b": stats(adapters=["sql"])}
    assert chooser.ranked(asked(model="sql", prompt="a"), both) == ["b", "a"]
    assert ReplicaChooser[str](["m"], Clock()).ranked(asked(model="m", prompt="a"), both) == ["a", "b"]


def test_a_replica_that_is_gone_is_forgotten() -> None:
    clock = Clock()
    chooser = ReplicaChooser[str](["m"], clock)
    long = asked(model="m", prompt=LONG)
    assert chooser.ranked(long, {"a": stats(sequences=1), "b": stats()})[0] == "b"
    chooser.keep({"a"})
    clock.now += 2 * STATS_S
    assert chooser.ranked(long, {"a": stats(), "b": stats(sequences=1)})[0] == "a"


async def call(app: Any, method: str, path: str, body: bytes = b"") -> tuple[int, dict[str, Any]]:
    """The status and the JSON answer of an ASGI application; the body is sent in two pieces."""
    sent: list[dict[str, Any]] = []
    pieces = [{"type": "http.request", "body": body[:5], "more_body": True}, {"type": "http.request", "body": body[5:]}]

    async def receive() -> dict[str, Any]:
        return pieces.pop(0)

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "method": method, "path": path, "headers": [], "query_string": b""}
    await app(scope, receive, send)
    return sent[0]["status"], json.loads(b"".join(message.get("body", b"") for message in sent))


class Handle:
    """A deployment's handle: returns its only replica, or raises its error."""

    def __init__(self, where: tuple[str, int] | None = ("10.0.0.1", 30000), error: Exception | None = None) -> None:
        self.where, self.error, self.got = where, error, AskedOfReplica()

    @asynccontextmanager
    async def choose_replica(self, found: AskedOfReplica, _reserve: bool) -> Any:
        if self.error is not None:
            raise self.error
        self.got = found
        name = SimpleNamespace(to_full_id_str=lambda: "replica-1")
        yield SimpleNamespace(_replica=SimpleNamespace(backend_http_endpoint=self.where, replica_id=name))


def test_haproxy_is_told_a_replica() -> None:
    body, handle = json.dumps({"model": "m", "prompt": LONG}).encode(), Handle()
    found = asyncio.run(call(RouteApp(handle), "POST", "/internal/route", body))
    assert found == (200, {"host": "10.0.0.1", "port": 30000, "replica_id": "replica-1"})
    assert handle.got == read_asked(body) and handle.got.keys
    assert asyncio.run(call(RouteApp(handle), "GET", "/v1/models"))[0] == 404


@pytest.mark.parametrize("handle", [Handle(None), Handle(error=RuntimeError("no replica")), Handle(error=KeyError(1))])
def test_without_a_replica_haproxy_is_told_so(handle: Handle) -> None:
    status, said = asyncio.run(call(RouteApp(handle), "POST", "/internal/route", b"{}"))
    assert status == 503 and said["detail"]


@pytest.mark.parametrize(
    "path", ["/v1/engine", "/v1/refit", "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/lora-adapters"]
)
def test_one_replica_is_not_changed_alone(path: str) -> None:
    async def inner(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    app = RefuseChanges(inner)
    status, said = asyncio.run(call(app, "POST", path))
    assert status == 409 and "one replica of several" in said["error"]["message"]
    assert asyncio.run(call(app, "GET", path))[0] == 200 and asyncio.run(call(app, "POST", "/v1/completions"))[0] == 200

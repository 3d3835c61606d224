"""RELIABILITY S8, S9, S10, S11: who may send requests, what clients see of each other, and what the server reveals of
itself."""

from __future__ import annotations

import base64
import bisect
import json
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from icc.runtime.errors import UsageError
from icc.runtime.kv.prefix_cache import BlockKey, child_key, root_key
from icc.runtime.server.api.keys import ApiKeys
from icc.runtime.server.http.serve import check_bind
from sizes import size_of

from .conftest import Served, StartServer, running

KEY, OTHER = "a-key-of-some-length", "another-key-entirely"


@pytest.fixture(scope="module")
def guarded(chat_engine: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with two keys."""
    import sys

    folder = tmp_path_factory.mktemp("guarded")
    (folder / "keys").write_text(f"# two\n{KEY}\n\n{OTHER}\n")
    command = [sys.executable, "-m", "icc.compiler.cli", "serve", str(chat_engine), "--port", "0", "--threads", "1"]
    with running([*command, "--api-key-file", str(folder / "keys")], folder / "log", "toy", KEY) as server:
        yield server


def routes(served: Served) -> list[tuple[str, str]]:
    paths = json.loads(served.ask("GET", "/openapi.json").raw)["paths"]
    found = [(method.upper(), path) for path, methods in paths.items() for method in methods]
    assert len(found) >= 9
    return [
        *found,
        ("GET", "/"),
        ("GET", "/openapi.json"),
        ("GET", "/nothing"),
        ("DELETE", "/v1/models"),
        ("GET", "//live"),
    ]


def test_every_route_but_two_needs_a_key(guarded: Served) -> None:
    basic = base64.b64encode(b"user:not-the-key").decode()
    wrong = [
        "", "Bearer", "Bearer ", f"Bearer {KEY[:-1]}", f"Bearer {KEY}x", f"Bearer {KEY} {KEY}", f"bearer{KEY}", KEY,
        f"Token {KEY}", "Bearer " + "x" * 20_000, "Basic", "Basic !!!", f"Basic {basic}", "Bearer # two", "Bearer \xff",
    ]  # fmt: skip
    for method, path in routes(guarded):
        path = (
            path.replace("{model}", "toy")
            .replace("{file_id}", "file-1")
            .replace("{batch_id}", "batch_1")
            .replace("{response_id}", "resp_1")
        )
        for header in wrong[:3] if path != "/v1/models" else wrong:
            reply = guarded.ask(method, path, headers={"Authorization": header})
            expected = 200 if path in ("/live", "/ready") else 401
            assert reply.status == expected, (method, path, header)
            if expected == 401 and method != "HEAD":
                error = reply.json["error"]  # Ollama's API has a string there
                assert "www-authenticate" in reply.headers
                assert isinstance(error, str) == path.startswith("/api/")
                assert isinstance(error, str) or error["type"] == "authentication_error"


def test_both_keys_and_a_browsers_way_to_send_them_are_accepted(guarded: Served) -> None:
    basic = base64.b64encode(f"me:{OTHER}".encode()).decode()
    for header in (f"Bearer {KEY}", f"bearer  {OTHER}", f"Basic {basic}"):
        assert guarded.ask("GET", "/v1/models", headers={"Authorization": header}).status == 200
    with socket.create_connection(("127.0.0.1", guarded.port)) as raw:  # two headers are refused, even with right keys
        line = f"authorization: Bearer {KEY}\r\n"
        raw.sendall(f"GET /v1/models HTTP/1.1\r\nhost: a\r\n{line}{line}\r\n".encode())
        assert raw.recv(100).startswith(b"HTTP/1.1 401")


def test_clients_do_not_share_the_prefix_cache(guarded: Served) -> None:
    def cached(key: str, prompt: str, **fields) -> int:
        body = {"model": "toy", "prompt": prompt, "max_tokens": 1, **fields}
        reply = guarded.ask("POST", "/v1/completions", body, {"Authorization": f"Bearer {key}"})
        return reply.json["usage"]["prompt_tokens_details"]["cached_tokens"]

    hits = {"same": 0, "other": 0, "salted": 0}
    for number in range(20):
        prompt = f"{number} what only one client knows, {number}"
        assert cached(KEY, prompt) == 0
        hits["other"] += cached(OTHER, prompt) > 0
        hits["same"] += cached(KEY, prompt) > 0
        hits["salted"] += cached(KEY, prompt, cache_salt="x") > 0
    assert hits == {"same": 20, "other": 0, "salted": 0}


def test_a_guess_of_anothers_prompt_hits_nothing_and_is_counted_so(guarded: Served) -> None:
    """The cause of timing differences: none of fifty right guesses finds a block of another client."""
    for number in range(50):
        prompt = f"{number:3} private".ljust(12, "a")
        for key, found in ((KEY, 0), (OTHER, 0), (OTHER, 1)):
            before = guarded.metric("icc:prefix_cache_hits_total")
            body = {"model": "toy", "prompt": prompt, "max_tokens": 1}
            reply = guarded.ask("POST", "/v1/completions", body, {"Authorization": f"Bearer {key}"})
            assert reply.status == 200
            assert (guarded.metric("icc:prefix_cache_hits_total") > before) == found, (number, key)


def test_timing_says_nothing_of_anothers_prompts(start_faulty: StartServer, tmp_path: Path) -> None:
    """S8 as measured, in `make soak` only: the times of 1,000 right guesses and 1,000 wrong ones."""
    count = size_of("timing_guesses")
    if not count:
        pytest.skip("times are looked at in `make soak`")
    (tmp_path / "keys").write_text(f"{KEY}\n{OTHER}\n")
    server = start_faulty("none", api_key_file=str(tmp_path / "keys"))  # 20 ms per step of 64 tokens

    def seconds(key: str, prompt: str) -> float:
        body, start = {"model": "toy", "prompt": prompt, "max_tokens": 1}, time.perf_counter()
        assert server.ask("POST", "/v1/completions", body, {"Authorization": f"Bearer {key}"}).status == 200
        return time.perf_counter() - start

    times: dict[str, list[float]] = {"own": [], "right": [], "wrong": []}
    for number in range(count):
        prompt = f"{number} private ".ljust(200, "a")
        seconds(KEY, prompt)
        times["right"].append(seconds(OTHER, prompt))
        times["wrong"].append(seconds(OTHER, f"{number} a guess ".ljust(200, "a")))
        times["own"].append(seconds(KEY, prompt))
    across, control = chance_faster(times["right"], times["wrong"]), chance_faster(times["own"], times["wrong"])
    assert max(across, 1 - across) <= 0.55 and control >= 0.95, (across, control)


def chance_faster(some: list[float], others: list[float]) -> float:
    """The area under the curve: the probability that a value of `some` is less than one of `others`."""
    ordered = sorted(others)
    return sum(len(ordered) - bisect.bisect_left(ordered, value) for value in some) / len(some) / len(ordered)


@given(st.lists(st.tuples(st.binary(max_size=3), st.lists(st.integers(0, 3), max_size=6)), min_size=2, unique_by=repr))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_different_contents_have_different_block_keys(contents: list[tuple[bytes, list[int]]]) -> None:
    """S8: the salt and all tokens up to the end of a block determine its key, for any split into blocks of one size."""
    for size in (1, 2, 3):
        seen: dict[BlockKey, tuple[bytes, tuple[int, ...]]] = {}
        for salt, tokens in contents:
            key = root_key(salt)
            for end in range(size, len(tokens) + 1, size):
                key = child_key(key, tokens[end - size : end])
                assert seen.setdefault(key, (salt, tuple(tokens[:end]))) == (salt, tuple(tokens[:end]))
        assert len(seen) == len(set(seen.values()))


@given(st.lists(st.tuples(st.text(max_size=4), st.none() | st.text(max_size=4)), min_size=2, max_size=6, unique=True))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_different_fields_give_different_salts(fields: list[tuple[str, str | None]]) -> None:
    keys = ApiKeys([KEY])
    salts = [keys.salt(client, salt) for client, salt in fields]
    assert len(set(salts)) == len(fields) and all(len(salt) == 32 for salt in salts)
    assert ApiKeys([KEY]).salt(*fields[0]) != salts[0]  # a restart has another secret


def test_key_files_are_checked(tmp_path: Path) -> None:
    for content in ("", "# none\n", "short\n"):
        (tmp_path / "keys").write_text(content)
        with pytest.raises(UsageError):
            ApiKeys.read(tmp_path / "keys")
    with pytest.raises(UsageError):
        ApiKeys.read(tmp_path / "missing")
    assert ApiKeys().client(None) == "" and ApiKeys([KEY]).client(b"Bearer " + KEY.encode()) not in ("", KEY, None)


def test_only_loopback_without_keys() -> None:
    for host in ("127.0.0.1", "::1", "localhost", "127.9.9.9"):
        check_bind(host, has_keys=False)
    for host in ("0.0.0.0", "::", "10.0.0.1", "example.org", ""):
        with pytest.raises(UsageError):
            check_bind(host, has_keys=False)
        check_bind(host, has_keys=True)


def test_one_socket_listens_and_none_goes_out(guarded: Served) -> None:
    guarded.complete("a", max_tokens=2)
    guarded.ask("POST", "/v1/completions", {"model": "toy", "prompt": "http://127.0.0.1:1/x", "max_tokens": 1})
    server = psutil.Process(guarded.process.pid)
    for process in [server, *server.children(recursive=True)]:
        for connection in process.net_connections("inet"):
            local = connection.laddr.port
            assert local == guarded.port, (process.cmdline(), connection)
            assert connection.status != psutil.CONN_SYN_SENT


def test_while_it_serves_nothing_is_executed_connected_or_written(
    start_faulty: StartServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Audit hooks in both processes, enabled once the engine is loaded."""
    log = tmp_path / "watch"
    monkeypatch.setenv("ICC_WATCH_LOG", str(log))
    server = start_faulty("none")
    server.complete(["a", "b"], max_tokens=3, n=2, logprobs=2, echo=True, temperature=3, seed=1)
    server.chat("http://127.0.0.1:1/x {{ ''.__class__ }}", max_tokens=2, stream=True)
    server.ask("POST", "/v1/completions", b"{" * 300)
    server.ask("POST", "/v1/completions", {"model": "toy", "prompt": "a", "response_format": {"type": "json_object"}})
    server.ask("GET", "/metrics")
    server.ask("GET", "/openapi.json")
    server.stream("a", max_tokens=50).drop()
    server.wait_until(server.idle)
    assert log.read_text().splitlines() == ["watching"] * 2


SECRETS = re.compile(rb"0x[0-9a-fA-F]{6,}|Traceback|/(?:root|tmp|usr|home|work|proc)/|icc-|site-packages")


def test_errors_and_logs_say_nothing_of_the_inside(guarded: Served) -> None:
    other_prompt = "the-secret-prompt-of-someone-else"
    guarded.complete(other_prompt, max_tokens=1)
    bodies: list[bytes] = [
        b"", b"{", b"null", b"[]", b'"x"', b"\x00", b"\xff\xfe", b"[" * 5000, b'{"model": "toy"}', b'{"model": 1}',
        b'{"model": "toy", "prompt": {"a": 1}}', b'{"model": "toy", "prompt": "a", "model": "x\\n\\u001b[31m"}',
        b'{"model": "toy", "prompt": "a", "response_format": {"type": "regex", "regex": "("}}',
        b'{"model": "toy", "prompt": "a", "n": 1e400}', b'{"model": "toy", "messages": [{"role": "user"}]}',
        b'{"model": "../../etc/passwd", "prompt": "a"}',
    ]  # fmt: skip
    for path in (
        "/v1/completions",
        "/v1/chat/completions",
        "/tokenize",
        "/detokenize",
        "/v1/models/%2e%2e%2fx",
        "/x\n",
    ):
        for body in bodies:
            reply = guarded.ask("POST" if "models" not in path else "GET", path.strip(), body)
            assert 400 <= reply.status < 500, (path, body, reply.raw)
            assert not SECRETS.search(reply.raw) and other_prompt.encode() not in reply.raw, reply.raw
            assert b"\x1b" not in reply.raw and b"\n" not in reply.raw
    log = guarded.log.read_bytes()
    assert other_prompt.encode() not in log and KEY.encode() not in log and b"\x1b" not in log

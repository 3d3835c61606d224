"""RELIABILITY R4, R5, R6 and R12: an engine that dies, hangs or fails on one request; and the shutdown of a server."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any

import msgspec
import psutil
import pytest
from icc.runtime.server.engine import pulse
from icc.runtime.server.engine.channel import Channel
from icc.runtime.server.engine.engine_client import EngineClient
from icc.runtime.server.engine.frames import Frames
from icc.runtime.server.engine.messages import Working
from sizes import size_of

from .conftest import Served, StartServer

CANARY = "canary 0"  # counts on from "0" and never reaches the trigger "M"
FAULT = "L"  # the next token is "M"; the step that runs it fails


def test_a_dead_engine_ends_requests_and_is_started_again(start_faulty: StartServer) -> None:
    server = start_faulty("none")
    stream = server.stream("a", max_tokens=100)
    assert "choices" in stream.event()
    os.kill(server.engine_pid, signal.SIGKILL)
    *_, last = stream.rest()
    assert last["error"]["message"] == "the engine died"
    assert server.ask("GET", "/ready").status == 503 or server.metric("icc:engine_restarts_total") >= 1
    server.wait_until(lambda: server.ask("GET", "/ready").status == 200)
    assert server.complete("a", max_tokens=3)["choices"][0]["text"] == "bcd"
    server.wait_until(server.idle)


def test_while_the_engine_is_dead_requests_get_503(start_faulty: StartServer) -> None:
    server = start_faulty("exit")
    reply = server.ask("POST", "/v1/completions", {"model": "toy", "prompt": FAULT, "max_tokens": 5})
    assert reply.status == 503 and reply.json["error"]["message"] == "the engine died"
    assert reply.headers["retry-after"] == "1" and reply.json["error"]["code"] == "engine_unavailable"
    statuses = {server.ask("POST", "/v1/completions", {"model": "toy", "prompt": "a", "max_tokens": 1}).status}
    server.wait_until(lambda: server.ask("GET", "/ready").status == 200)
    assert statuses <= {200, 503}
    assert server.ask("GET", "/live").status == 200


@pytest.mark.parametrize("how", ["step", "stopped"])
def test_a_hung_engine_is_seen_by_the_watchdog(start_faulty: StartServer, how: str) -> None:
    server = start_faulty("hang", watchdog_s=1.0)
    pid = server.engine_pid
    stream = server.stream(FAULT if how == "step" else "a", max_tokens=100)
    stream.event()
    if how == "stopped":
        os.kill(pid, signal.SIGSTOP)
    *_, last = stream.rest()
    assert "hangs" in last["error"]["message"]
    server.wait_until(lambda: not psutil.pid_exists(pid))
    server.wait_until(lambda: server.ask("GET", "/ready").status == 200)


def test_a_step_that_takes_long_is_no_hang(start_faulty: StartServer) -> None:
    """The step takes two and a half times the watchdog's limit, while the process uses the CPU."""
    server = start_faulty("busy", watchdog_s=2.0)
    last = server.stream(FAULT, max_tokens=3).rest()[-1]
    assert "choices" in last and last["choices"][0]["finish_reason"] == "length", last
    assert server.metric("icc:engine_restarts_total") == 0


def test_an_engine_that_only_works_is_given_up_too() -> None:
    client = EngineClient(["unused"], watchdog_s=10)
    client._heard, client._done = 399.0, 100.0
    assert not client._hangs(400.0)
    assert client._hangs(401.0) == "hangs: it has worked on one step for 301.0 s"
    assert client._hangs(410.0) == "hangs: it has said nothing for 11.0 s"


def test_a_process_says_that_it_works_only_where_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU time between two looks decides; a process that waits uses a little, too."""
    monkeypatch.setattr(pulse, "HEARTBEAT_S", 0.001)
    used, read = [0.0, 0.004, 0.008, 0.012, 0.016, 0.03, 0.034, 0.05, 0.0501], list[float]()

    def cpu_time() -> float:
        read.append(used[min(len(read), len(used) - 1)])
        return read[-1]

    ours, theirs = socket.socketpair()
    with ours, theirs:
        one = pulse.Pulse(Channel(theirs), [lambda: 1.0, cpu_time])
        while len(read) < 2 * len(used):
            time.sleep(0.001)
        one.stop()
        assert Frames().feed(ours.recv(1000)) == [msgspec.msgpack.encode(Working())] * 2


def test_ranks_that_work_are_work() -> None:
    """Rank 0 sleeps while it waits for another rank's long step: the CPU time of the other ranks counts, too."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as rank:
        _, clock = pulse.cpu_clocks([rank.pid])
        before, end = clock(), time.monotonic() + 60
        while clock() - before < 2 * pulse._WORK_S:
            assert time.monotonic() < end
            time.sleep(0.01)
        rank.kill()
        rank.wait()
        assert clock() == 0  # the process has ended


def test_a_server_that_was_stopped_itself_does_not_blame_the_engine(start_faulty: StartServer) -> None:
    server = start_faulty("none", watchdog_s=3.0)
    stream = server.stream("0", max_tokens=25)
    stream.event()
    pids = [server.process.pid, server.engine_pid]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(5)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.6)
    assert stream.rest()[-1]["choices"][0]["finish_reason"] == "length"
    assert server.engine_pid == pids[1] and server.metric("icc:engine_restarts_total") == 0


def test_no_process_outlives_the_server(start_faulty: StartServer) -> None:
    server = start_faulty("hang")
    children = psutil.Process(server.process.pid).children(recursive=True)
    assert len(children) == 3  # the engine, the renderer of templates and the checker of grammars
    stream = server.stream(FAULT, max_tokens=5)
    stream.event()
    server.process.kill()
    server.wait_until(lambda: not any(map(runs, children)), 60)


def runs(process: psutil.Process) -> bool:
    """Whether a process still runs; a zombie does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
STAGES: list[tuple[str, str, dict[str, Any], int]] = [
    ("parse", COMPLETIONS, {"prompt": "!parse"}, 500),
    ("template", CHAT, {"messages": [{"role": "user", "content": "!template"}]}, 500),
    ("tokenise", COMPLETIONS, {"prompt": "!tokenise"}, 500),
    ("an id too large", COMPLETIONS, {"prompt": "!large"}, 400),
    ("a negative id", COMPLETIONS, {"prompt": "!negative"}, 400),
    ("grammar", COMPLETIONS, {"prompt": "a", "response_format": {"type": "regex", "regex": "!grammar"}}, 500),
    ("prefill", COMPLETIONS, {"prompt": "xM"}, 500),
    ("a later chunk of a prompt", COMPLETIONS, {"prompt": "x" * 150 + "M" + "x" * 20}, 500),
    ("the prompt's own logprobs", COMPLETIONS, {"prompt": "xMx", "echo": True, "logprobs": 1}, 500),
    ("decode", COMPLETIONS, {"prompt": "L"}, 500),
    ("decode of several", COMPLETIONS, {"prompt": ["L", "K", "J"], "n": 2}, 500),
    ("logits that are no numbers", COMPLETIONS, {"prompt": "xxO"}, 500),
    ("sample", COMPLETIONS, {"prompt": "S"}, 500),
    ("a sample that is no token", COMPLETIONS, {"prompt": "V"}, 500),
    ("detokenise", COMPLETIONS, {"prompt": "Y"}, 500),
    ("write", COMPLETIONS, {"prompt": "!write"}, 500),
    ("write an event", COMPLETIONS, {"prompt": "|", "stream": True}, 200),
]  # fmt: skip


def test_one_bad_request_fails_alone_at_every_stage(start_faulty: StartServer) -> None:
    """R5: every stage of a request raises an error, or gives NaN or a token that does not exist."""
    server = start_faulty("stages")
    pid = server.engine_pid
    canaries: list[str] = []
    done = threading.Event()

    def sing() -> None:
        while not done.is_set():
            canaries.append(server.complete(CANARY, max_tokens=20)["choices"][0]["text"])

    threads = [threading.Thread(target=sing) for _ in range(3)]
    for thread in threads:
        thread.start()
    for stage, path, body, status in STAGES * 2:  # again, now out of the prefix cache if it held any of it
        reply = server.ask("POST", path, {"model": "toy", "max_tokens": 6, **body})
        assert reply.status == status, (stage, reply.raw)
        error = reply.events[-1]["error"] if status == 200 else reply.json["error"]
        assert error["message"], stage
        for inside in (b"secret", b"0x", b"Traceback", b"fault"):
            assert inside not in reply.raw, (stage, reply.raw)
    server.wait_until(lambda: len(canaries) > 9, 60)
    done.set()
    for thread in threads:
        thread.join()
    assert set(canaries) == {"123456789:;<=>?@ABCD"}
    assert server.engine_pid == pid
    server.wait_until(server.idle)
    assert server.metric("icc:kv_healed_total") == 0 and server.metric("icc:engine_restarts_total") == 0


def test_many_bad_requests_at_once_fail_alone(start_faulty: StartServer) -> None:
    """Most of the running requests fail; the others are answered."""
    server = start_faulty("stages")
    pid = server.engine_pid
    prompts = ("0", "L", "K", "xM", "L", "5", "O", "S")
    streams = [server.stream(prompt, max_tokens=20) for prompt in prompts]
    texts = {}
    for prompt, stream in zip(prompts, streams, strict=True):
        if stream.status == 200 and "choices" in (events := stream.rest())[-1]:
            texts[prompt] = "".join(event["choices"][0]["text"] for event in events)
    assert texts == {c: "".join(chr(ord(c) + 1 + i) for i in range(20)) for c in "05"}
    assert server.engine_pid == pid
    server.wait_until(server.idle)


def test_sigterm_lets_requests_end_and_refuses_new_ones(start_faulty: StartServer) -> None:
    server = start_faulty("none", watchdog_s=60, drain_s=60)
    engine = server.engine_pid
    streams = [server.stream("0", max_tokens=40) for _ in range(4)]
    for stream in streams:
        stream.event()
    os.kill(engine, signal.SIGSTOP)  # so that no stream, and with them the server, ends too early
    server.process.send_signal(signal.SIGTERM)
    server.wait_until(lambda: server.ask("GET", "/v1/models").status == 503)
    refused = server.ask("POST", "/v1/completions", {"model": "toy", "prompt": "a"})
    assert refused.status == 503 and refused.headers["retry-after"] == "5"
    os.kill(engine, signal.SIGCONT)
    for stream in streams:
        events = stream.rest()
        assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert server.process.wait(60) == 0


def test_sigterm_at_any_moment_leaves_no_stream_without_an_end(start_faulty: StartServer) -> None:
    """R12: under load, while requests arrive, prompts run, and answers are being written or begin; with one or two
    signals."""
    for number in range(size_of("sigterms")):
        chance = random.Random(number)
        server = start_faulty("none", drain_s=60)
        refused, ends = [], []

        def client(seed: int, server: Served = server, refused: list[int] = refused, ends: list[str] = ends) -> None:
            source = random.Random(seed)
            while True:
                try:
                    stream = server.stream("0" * source.randrange(1, 90), max_tokens=source.randrange(1, 25))
                except OSError:  # the server no longer listens
                    return
                if stream.status != 200:
                    refused.append(stream.status)
                    return
                last = stream.rest()[-1]  # rest() requires [DONE]
                ends.append(last["choices"][0]["finish_reason"] if "choices" in last else last["error"]["message"])

        threads = [threading.Thread(target=client, args=(number * 100 + i,)) for i in range(12)]
        for thread in threads:
            thread.start()
        time.sleep(chance.random() * 0.5)
        twice = chance.random() < 0.3
        for _ in range(1 + twice):
            server.process.send_signal(signal.SIGTERM)
            time.sleep(0.05)
        assert server.process.wait(100) == 0
        for thread in threads:
            thread.join()
        assert set(refused) <= {503} and set(ends) <= {"length", *(["the server has stopped"] if twice else [])}


def test_a_second_sigterm_and_a_timeout_end_streams_in_words(start_faulty: StartServer) -> None:
    for options, signals in (({"drain_s": 0.3}, 1), ({"drain_s": 60}, 2)):
        server = start_faulty("slow", **options)
        stream = server.stream("0", max_tokens=400)
        stream.event()
        for _ in range(signals):
            server.process.send_signal(signal.SIGTERM)
            time.sleep(0.1)
        *_, last = stream.rest()
        assert last["error"]["message"] == "the server has stopped"
        assert server.process.wait(60) == 0


def test_sigterm_while_loading_ends_at_once(start: StartServer) -> None:
    server = start(wait=False)
    time.sleep(0.7)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(60) in (0, -signal.SIGTERM)  # the latter if no handler was installed yet


def test_a_client_that_goes_frees_its_blocks_within_a_step(start_faulty: StartServer) -> None:
    server = start_faulty("slow")  # 0.2 s per step: 80 s for 400 tokens
    for reset in (False, True):
        stream = server.stream("0", max_tokens=400)
        stream.event()
        assert server.metric("icc:num_requests_running") == 1
        stream.drop(reset)
        server.wait_until(server.idle, 40)
    with socket.create_connection(("127.0.0.1", server.port)) as raw:  # answers that are not streamed, too
        body = b'{"model": "toy", "prompt": "0", "max_tokens": 400}'
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        server.wait_until(lambda: server.metric("icc:num_requests_running") == 1)
    server.wait_until(server.idle, 40)
    assert server.metric("icc:request_success_total") == 3  # by reason: abort
    answers = server.ask("GET", "/metrics").raw.decode()  # the server is not at fault if a client goes
    assert 'status="499"' in answers and 'status="500"' not in answers and "status=500" not in server.log.read_text()


def test_a_deadline_ends_a_request(start_faulty: StartServer) -> None:
    server = start_faulty("slow")
    for choice in server.complete("0", max_tokens=400, deadline=0.9, n=2)["choices"]:
        assert choice["finish_reason"] == "deadline" and "123456789:;<=>".startswith(choice["text"])
    events = server.stream("0", max_tokens=400, deadline=0.9).rest()
    assert events[-1]["choices"][0]["finish_reason"] == "deadline"
    server.wait_until(server.idle, 40)

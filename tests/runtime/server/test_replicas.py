"""Several engine processes behind one server: --replicas."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from .conftest import Served, StartServer

KEY = "a-key-of-thirty-two-characters-00"


def ready(server: Served) -> bool:
    return server.metric("icc:engine_ready") == 2


def test_what_a_dead_replica_has_not_begun_runs_elsewhere(start_faulty: StartServer) -> None:
    server = start_faulty("none", replicas=2)
    first, _ = server.engine_pids
    begun = [server.stream(chr(97 + number), max_tokens=90) for number in range(16)]  # both replicas' batches are full
    for stream in begun:
        assert "choices" in stream.event()
    answers: dict[int, str] = {}

    def ask(number: int) -> None:
        answers[number] = server.complete("abc", max_tokens=4)["choices"][0]["text"]

    waiting = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in waiting:
        thread.start()
    server.wait_until(lambda: server.metric("icc:num_requests_waiting") == 8)
    os.kill(first, signal.SIGKILL)
    ends = [stream.rest()[-1] for stream in begun]
    lost = [end["error"]["message"] for end in ends if "error" in end]
    assert lost == ["the engine died"] * 8  # only the requests that ran there
    for thread in waiting:
        thread.join()
    assert answers == dict.fromkeys(range(8), "defg")
    server.wait_until(lambda: ready(server))
    assert first not in server.engine_pids and server.metric("icc:engine_restarts_total") == 1
    assert server.metric("icc:replica_engine_restarts_total") == 1
    assert server.complete("a", max_tokens=3)["choices"][0]["text"] == "bcd"
    server.wait_until(server.idle)


def test_an_answer_in_one_piece_begins_again_elsewhere(start_faulty: StartServer) -> None:
    """Nothing of the answer was sent, though the replica that dies had begun, or ended, its completions."""
    server = start_faulty("none", replicas=2)
    first, _ = server.engine_pids
    answers: dict[int, Any] = {}

    def ask(number: int) -> None:
        answers[number] = server.complete("abc", max_tokens=24, n=2, stop=["p"] if number % 2 else None)

    asking = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in asking:
        thread.start()
    server.wait_until(lambda: server.metric("icc:generation_tokens_total") > 100)
    os.kill(first, signal.SIGKILL)
    for thread in asking:
        thread.join()
    whole = "".join(chr(number) for number in range(100, 124))
    for number, answer in answers.items():
        text, tokens = (whole[: whole.index("p")], 13) if number % 2 else (whole, 24)
        assert [choice["text"] for choice in answer["choices"]] == [text] * 2, number
        assert answer["usage"]["completion_tokens"] == 2 * tokens
    server.wait_until(server.idle)


def test_a_prompt_that_ends_its_engine_is_tried_twice(start_faulty: StartServer) -> None:
    server = start_faulty("exit", replicas=3)
    reply = server.ask("POST", "/v1/completions", {"model": "toy", "prompt": "M", "max_tokens": 5})
    assert reply.status == 503 and reply.json["error"]["message"] == "the engine died"
    assert server.ask("GET", "/ready").status == 200  # the third
    assert server.complete("a", max_tokens=3)["choices"][0]["text"] == "bcd"
    server.wait_until(lambda: server.metric("icc:engine_ready") == 3)
    assert server.metric("icc:engine_restarts_total") == 2


def test_prompts_of_one_request_are_divided(start_faulty: StartServer) -> None:
    server = start_faulty("none", replicas=2)
    found = server.complete([chr(97 + number) for number in range(6)], max_tokens=2, n=2)
    texts = [choice["text"] for choice in found["choices"]]
    assert texts == [chr(98 + number) + chr(99 + number) for number in range(6) for _ in range(2)]
    text = server.ask("GET", "/metrics").raw.decode()
    for replica in "01":
        assert f'icc:replica_generation_tokens_total{{model_name="toy",replica="{replica}"}} 12.0' in text


def test_a_conversation_stays_on_its_replica(start: StartServer) -> None:
    """Other requests come in between, which the other replica gets."""
    server = start("--replicas", "2")
    texts = {name: f"{name} " * 100 for name in ("one", "two")}

    def cached(prompt: str) -> int:
        usage = server.complete(prompt, max_tokens=4)["usage"]
        return (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)

    assert [cached(text) for text in texts.values()] == [0, 0]
    for turn in range(1, 4):
        for name, text in texts.items():
            assert cached(text + f"turn {turn} " * turn) >= 300, name


def test_a_rolling_reload_drops_no_stream(start: StartServer, tmp_path: Path) -> None:
    server = start("--replicas", "2", key=KEY)
    before = set(server.engine_pids)
    ends: list[Any] = []

    def talk(number: int) -> None:
        for _ in range(3):
            ends.append(server.complete("a" * (number + 1), max_tokens=600, ignore_eos=True, stream=True)[-1])

    talkers = [threading.Thread(target=talk, args=(number,)) for number in range(4)]
    for thread in talkers:
        thread.start()
    reply = server.ask("POST", "/v1/refit", {"wait_s": 60})
    assert reply.status == 200, reply.raw
    for thread in talkers:
        thread.join()
    assert [end["choices"][0]["finish_reason"] for end in ends] == ["length"] * 12
    assert before.isdisjoint(server.engine_pids) and len(server.engine_pids) == 2
    assert server.metric("icc:engine_restarts_total") == 0


@pytest.mark.parametrize(
    "options, words",
    [
        (("--replicas", "0"), "--replicas 0 is not from 1 to 64"),
        (("--replicas", "2", "--devices", "0,1"), "--devices is for GPU engines"),
        (("--replicas", "9", "--cores", "0"), "--cores 0 has 1 cores for 9 replicas"),
    ],
)
def test_what_cannot_be(start: StartServer, options: tuple[str, ...], words: str) -> None:
    server = start(*options, wait=False)
    assert server.process.wait(60) == 2
    assert words in server.log.read_text()

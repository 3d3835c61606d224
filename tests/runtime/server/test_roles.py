"""Replicas with roles: some compute long prompts, others answer them."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from icc.runtime.server.engine.router import ReplicaLoad
from icc.runtime.server.engine.step_costs import Costs, Placement, StepCosts, place

from .conftest import Served, StartServer

LONG = "".join(chr(97 + number % 8) for number in range(400))  # 400 tokens; a step takes 64
COSTS = Costs(prompt=0.001, taken=0.0001, step=0.02, unit=32, step_tokens=64)


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the first role compute every prompt, as if it always paid."""
    monkeypatch.setenv("ICC_MOVE_ALWAYS", "1")


def of_replica(server: Served, name: str) -> list[float]:
    """The values of a metric by replica; the one that computes prompts is first."""
    text = server.ask("GET", "/metrics").raw.decode()
    found = [line for line in text.splitlines() if line.startswith(f"icc:replica_{name}{{")]
    return [float(line.rsplit(" ", 1)[1]) for line in sorted(found, key=lambda line: line.split('replica="')[1])]


def taken(server: Served) -> float:
    """How many prompt tokens the answering replica has found in its cache."""
    return of_replica(server, "prefix_cache_hits_total")[1]


def measured(server: Served) -> None:
    """Let the server measure the cost of a prompt."""
    server.complete(LONG[::-1], max_tokens=1)


# -- where it pays ---------------------------------------------------------------------------------------------------


def placed(tokens: int, *loads: tuple[int, int], come: float = 0.0, best: int = 1) -> Placement:
    """The placement of a prompt of `tokens` tokens. loads: waiting tokens and decoding sequences of each replica; the
    first one computes prompts for others. best: the router's choice. come: prompts per second that each replica
    gets."""
    measured = [StepCosts() for _ in loads]
    for one in measured:
        for _ in range(round(30 * come)):
            one.arrive(0.0)
    found = [
        (ReplicaLoad(number, waiting, decoding, 8, 0.0, True, decoding), tokens)
        for number, (waiting, decoding) in enumerate(loads)
    ]
    return place(sorted(found, key=lambda one: one[0].replica != best), COSTS, measured, 1, 0.0)


def test_a_prompt_goes_where_all_wait_the_least() -> None:
    idle = (0, 0)
    assert placed(64, idle, (0, 8)) == Placement(1, None, 64)  # it takes one step on any replica
    assert placed(4000, idle, idle) == Placement(0, None, 4000)  # replica 0 is idle, and answers, too
    assert placed(4000, (0, 2), (0, 1), best=0) == Placement(1, None, 4000)
    assert placed(4000, (48, 0), (0, 1)) == Placement(0, None, 4000)  # a short prompt delays no one
    assert placed(4000, (4000, 0), idle) == Placement(1, None, 4000)  # no other prompts arrive
    assert placed(4000, (4000, 0), idle, come=0.5) == Placement(1, 0, 4000)  # new prompts find a free replica
    assert placed(4000, (4000, 0), idle, idle, come=0.5) == Placement(1, None, 4000)  # and in this case, too
    assert placed(4000, (4000, 0), (0, 4)) == Placement(1, 0, 4000)
    assert placed(4000, idle, (4000, 0), come=0.8, best=0) == Placement(1, None, 4000)
    assert placed(4000, (0, 1), (0, 0), come=0.8) == Placement(0, None, 4000)  # the other one is kept for new prompts
    assert placed(4000, (4000, 0), (4000, 0), come=0.5).computes in (0, None)


def test_what_is_known_of_costs_decides() -> None:
    loads = [ReplicaLoad(number, 4000 * (1 - number), 0, 8, 0.0, True) for number in (1, 0)]
    measured = [StepCosts(), StepCosts()]
    for _ in range(30):
        measured[1].arrive(0.0)

    def computed(costs: Costs | None, prefills: int = 1, here: int = 4000) -> int | None:
        return place([(loads[0], here), (loads[1], 4000)], costs, measured, prefills, 0.0).computes

    assert computed(COSTS) == 0
    assert computed(None) is None and computed(COSTS, prefills=0) is None
    assert computed(COSTS, here=1000) is None  # the beginning is cached here
    slow = Costs(prompt=0.001, taken=0.005, step=0.02, unit=32)  # taking the KV costs more than computing it
    assert computed(slow) is None


def test_costs_are_those_that_were_measured() -> None:
    costs = StepCosts()
    assert Costs.of([costs], 32) is None
    for _ in range(100):
        costs.add(512, 0.25, 1)
        costs.add(4, 0.01, 4)
    costs.add(0, 0.0, 4)  # a heartbeat
    found = Costs.of([costs, StepCosts()], 32)
    assert found is not None and found.taken == 0.0
    assert found.prompt == pytest.approx(0.25 / 512) and found.step == pytest.approx(0.01)
    for second in range(200):
        costs.arrive(second / 2)
    assert costs.arrivals(100) == pytest.approx(2, rel=0.1) and costs.arrivals(400) < 0.01
    costs.taken.add(1000, 0.05)
    assert Costs.of([costs], 32).taken == pytest.approx(5e-5)  # type: ignore[union-attr]
    for _ in range(300):  # the machine is slower now
        costs.prompt.add(512, 0.5)
    assert costs.prompt.seconds == pytest.approx(0.5 / 512, rel=0.01)


# -- servers with roles ---------------------------------------------------------------------------------------------


def test_a_server_moves_nothing_that_does_not_pay(start_faulty: StartServer) -> None:
    """The replica that computes prompts also answers them, while it has nothing else to do."""
    server = start_faulty("none", replicas=2, prefill_replicas=1)
    measured(server)
    chat = server.stream("a", max_tokens=400)
    chat.event()
    before = of_replica(server, "generation_tokens_total")[0]
    assert server.complete(LONG, max_tokens=8)["choices"][0]["text"]
    assert of_replica(server, "generation_tokens_total")[0] == before + 8 and taken(server) == 0
    chat.drop()
    server.wait_until(server.idle)


@pytest.mark.usefixtures("moves")
def test_a_long_prompt_is_computed_elsewhere_and_answered_beside_a_chat(start_faulty: StartServer) -> None:
    began = time.time()
    server = start_faulty("none", replicas=2, prefill_replicas=1)
    measured(server)
    assert of_replica(server, "generation_tokens_total")[0] == 0  # no other request waited: the prompt stayed
    whole = server.complete(LONG, max_tokens=8)["choices"][0]["text"]
    before = taken(server)
    chat = server.stream("a", max_tokens=400)  # it runs longer than the requests below, also on a busy machine
    chat.event()
    for number in range(3):
        prompt = f"{number}" + LONG
        assert server.complete(prompt, max_tokens=8, n=2)["choices"][1]["text"] == whole
    assert taken(server) - before >= 3 * 396
    assert of_replica(server, "generation_tokens_total")[0] == 4  # one token for each prompt, which no client gets
    short = of_replica(server, "prompt_tokens_total")[0]
    assert server.complete("abc", max_tokens=4)["choices"][0]["text"] == "defg"
    assert of_replica(server, "prompt_tokens_total")[0] == short  # it stays
    chat.drop()
    server.wait_until(server.idle)
    check_nothing_is_left(server, began)


def check_nothing_is_left(server: Served, since: float) -> None:
    """Wait until no file of KV remains that this user's engines have made since then; other tests remove theirs."""
    server.wait_until(lambda: not [path for path in Path("/dev/shm").glob("icc-kv-*") if is_ours(path, since)])


def is_ours(path: Path, since: float) -> bool:
    with contextlib.suppress(FileNotFoundError):
        found = path.stat()
        return found.st_uid == os.geteuid() and found.st_mtime >= since
    return False


@pytest.mark.usefixtures("moves")
@pytest.mark.parametrize("victim", [0, 1], ids=["prefill", "decode"])
def test_no_accepted_request_is_lost_with_a_replica(victim: int, start_faulty: StartServer) -> None:
    """One replica computes prompts while the other answers a chat. Only the chat, which had begun, ends with an error,
    and only if its own replica dies."""
    server = start_faulty("none", replicas=2, prefill_replicas=1)
    measured(server)
    expected = server.complete(LONG, max_tokens=4)["choices"][0]["text"]
    chat = server.stream("a", max_tokens=250)
    chat.event()
    answers: dict[int, Any] = {}

    def ask(number: int) -> None:
        reply = server.ask("POST", "/v1/completions", {"model": "toy", "prompt": f"{number}{LONG}", "max_tokens": 4})
        answers[number] = reply.json

    asking = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    before = of_replica(server, "prompt_tokens_total")[0]
    for thread in asking:
        thread.start()
    server.wait_until(lambda: of_replica(server, "prompt_tokens_total")[0] > before)  # at least one is there
    os.kill(server.engine_pids[victim], signal.SIGKILL)
    for thread in asking:
        thread.join()
    assert [answers[number]["choices"][0]["text"] for number in range(4)] == [expected] * 4, answers
    last = chat.rest()[-1]
    assert ("error" in last) == (victim == 1), last
    server.wait_until(lambda: server.metric("icc:engine_ready") == 2)
    server.wait_until(server.idle)


@pytest.mark.usefixtures("moves")
def test_a_role_that_hangs_is_done_without(start_faulty: StartServer) -> None:
    """The prompt being computed there is answered, and a chat beside it continues; the process is restarted."""
    server = start_faulty("none", replicas=2, prefill_replicas=1, watchdog_s=1.5)
    measured(server)
    expected = server.complete(LONG, max_tokens=4)["choices"][0]["text"]
    chat, answers = server.stream("a", max_tokens=250), list[Any]()
    chat.event()
    before = of_replica(server, "prompt_tokens_total")[0]
    asking = threading.Thread(target=lambda: answers.append(server.complete("?" + LONG, max_tokens=4)))
    asking.start()
    server.wait_until(lambda: of_replica(server, "prompt_tokens_total")[0] > before)
    os.kill(server.engine_pids[0], signal.SIGSTOP)
    asking.join(30)
    assert answers and answers[0]["choices"][0]["text"] == expected
    assert "error" not in chat.rest()[-1]
    server.wait_until(lambda: server.metric("icc:engine_ready") == 2)
    server.wait_until(server.idle)


def taken_files(server: Served) -> list[str]:
    """Files of KV that the answering replica has open, including removed ones."""
    folder, found = Path(f"/proc/{server.engine_pids[1]}/fd"), list[str]()
    for number in folder.iterdir():
        with contextlib.suppress(OSError):
            found.append(os.readlink(number))
    return [path for path in found if "icc-kv-" in path]


@pytest.mark.usefixtures("moves")
def test_what_nobody_waits_for_is_let_go_under_load(start_faulty: StartServer) -> None:
    """A replica that always has a running sequence still drops the files of prompts whose clients have gone."""
    server = start_faulty("slow", replicas=2, prefill_replicas=1)
    measured(server)
    chat = server.stream("a", max_tokens=480)
    chat.event()
    for number in range(2):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        body = {"model": "toy", "prompt": f"{number}{LONG}"}
        connection.request("POST", "/v1/completions", json.dumps(body).encode())
        server.wait_until(lambda: bool(taken_files(server)))
        connection.close()
        server.wait_until(lambda: not taken_files(server), 8)
    assert server.metric("icc:num_requests_running") >= 1  # the chat
    chat.drop()
    server.wait_until(server.idle)


@pytest.mark.usefixtures("moves")
def test_a_client_that_goes_ends_what_is_computed_for_it(start_faulty: StartServer) -> None:
    began = time.time()
    server = start_faulty("none", replicas=2, prefill_replicas=1)
    measured(server)
    chat = server.stream("a", max_tokens=400)
    chat.event()
    before = of_replica(server, "prompt_tokens_total")[0]
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    body = b'{"model": "toy", "max_tokens": 4, "prompt": "' + LONG.encode() + b'"}'
    connection.request("POST", "/v1/completions", body)
    server.wait_until(lambda: of_replica(server, "prompt_tokens_total")[0] > before)
    connection.close()
    chat.drop()
    server.wait_until(server.idle)
    check_nothing_is_left(server, began)


def test_what_cannot_have_roles_is_told(start: StartServer) -> None:
    for options, said in (
        (("--replicas", "2", "--prefill-replicas", "2"), "--prefill-replicas 2 of --replicas 2"),
        (("--prefill-replicas", "1"), "leaves none that answers"),
        (("--replicas", "2", "--prefill-replicas", "-1"), "--prefill-replicas -1"),
    ):
        server = start(*options, wait=False)
        assert server.process.wait(60) == 2
        assert said in server.log.read_text()

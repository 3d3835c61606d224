"""Replicas with roles: some compute long prompts, and others answer them."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from icc.runtime.server.engine.router import ReplicaLoad
from icc.runtime.server.engine.step_costs import Costs, Placement, Site, StepCosts, place

from .conftest import Served, StartServer

LONG = "".join(chr(97 + number % 8) for number in range(400))  # tokens, of which a step takes 64
COSTS = Costs(prompt=0.001, taken=0.0001, step=0.02, unit=32, step_tokens=64)


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers have every prompt computed by the first role, as if it always paid."""
    monkeypatch.setenv("ICC_MOVE_ALWAYS", "1")


def site(number: int, tokens: int, waiting: int = 0, decoding: int = 0, busy: float = 0.0, come: float = 0.0) -> Site:
    return Site(ReplicaLoad(number, waiting, decoding, 8, 0.0, True, decoding), tokens, busy, come)


def of_replica(server: Served, name: str) -> list[float]:
    """A metric of each replica, the one that computes prompts first."""
    text = server.ask("GET", "/metrics").raw.decode()
    found = [line for line in text.splitlines() if line.startswith(f"icc:replica_{name}{{")]
    return [float(line.rsplit(" ", 1)[1]) for line in sorted(found, key=lambda line: line.split('replica="')[1])]


def taken(server: Served) -> float:
    """Prompt tokens that the replica which answers found in its cache."""
    return of_replica(server, "prefix_cache_hits_total")[1]


def measured(server: Served) -> None:
    """The server knows what a prompt costs."""
    server.complete(LONG[::-1], max_tokens=1)


# -- where it pays ---------------------------------------------------------------------------------------------------


def test_a_prompt_moves_where_that_keeps_less_from_others() -> None:
    def pays(tokens: int, **here: Any) -> bool:
        return COSTS.pays(site(1, tokens, **here), site(0, tokens))

    assert not pays(100)  # nobody is kept waiting
    assert pays(4000)  # somebody may come before it has run
    assert pays(100, busy=1.5)  # nobody just now, but most of the time
    assert not pays(64, decoding=8)  # they wait for one step wherever it runs
    assert not COSTS.pays(site(1, 4000, decoding=1), site(0, 4000, waiting=4000))
    assert COSTS.pays(site(1, 4000, decoding=1, come=1.0), site(0, 4000, waiting=4000))  # who would come meanwhile
    assert COSTS.pays(site(1, 4000, waiting=4000), site(0, 4000))
    assert not COSTS.pays(site(1, 4000, decoding=1), site(0, 4000, decoding=1))  # there it keeps as many
    assert COSTS.pays(site(1, 4000, decoding=3), site(0, 4000, decoding=1))
    assert not COSTS.pays(site(1, 1000, decoding=1), site(0, 4000))  # here its beginning is cached
    slow = Costs(prompt=0.001, taken=0.002, step=0.02, unit=32)  # to take it costs more than to compute it
    assert not slow.pays(site(1, 4000, decoding=8), site(0, 4000))


def test_who_answers_is_the_routers_choice_of_all() -> None:
    """Only a prompt that another replica than one of the first role answers can move."""
    here, there = (ReplicaLoad(number, 0, decoding, 8, 0.0, True, decoding) for number, decoding in ((1, 3), (0, 0)))
    measured = [StepCosts(), StepCosts()]
    moved = place([(here, 4000), (there, 4000)], COSTS, measured, 1, 0.0)
    assert moved == Placement(answers=1, computes=0, tokens=4000)
    assert place([(there, 4000), (here, 4000)], COSTS, measured, 1, 0.0) == Placement(0, None, 4000)
    assert place([(here, 4000), (there, 4000)], None, measured, 1, 0.0) == Placement(1, None, 4000)
    assert place([(here, 4000), (there, 4000)], COSTS, measured, 0, 0.0) == Placement(1, None, 4000)
    assert place([(here, 4000)], COSTS, measured, 1, 0.0) == Placement(1, None, 4000)


def test_costs_are_those_that_were_measured() -> None:
    costs = StepCosts()
    assert Costs.of([costs], 32) is None
    for second in range(100):
        costs.add(512, 0.25, 1, second)
        costs.add(4, 0.01, 4, second + 0.5)
    costs.add(0, 0.0, 4, 100)  # a heartbeat
    found = Costs.of([costs, StepCosts()], 32)
    assert found is not None and found.taken == 0.0
    assert found.prompt == pytest.approx(0.25 / 512) and found.step == pytest.approx(0.01)
    assert 2 < costs.busy < 3
    for second in range(200):
        costs.arrive(second / 2)
    assert costs.arrivals(100) == pytest.approx(2, rel=0.1) and costs.arrivals(400) < 0.01
    costs.taken.add(1000, 0.05)
    assert Costs.of([costs], 32).taken == pytest.approx(5e-5)  # type: ignore[union-attr]
    for _ in range(300):  # the machine has become slower
        costs.prompt.add(512, 0.5)
    assert costs.prompt.seconds == pytest.approx(0.5 / 512, rel=0.01)


# -- a server of such ------------------------------------------------------------------------------------------------


def test_a_server_moves_nothing_that_does_not_pay(start_faulty: StartServer) -> None:
    """The replica that computes prompts answers, too, while none is in the way."""
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
    assert of_replica(server, "generation_tokens_total")[0] == 0  # nobody was kept waiting: it stayed
    whole = server.complete(LONG, max_tokens=8)["choices"][0]["text"]
    before = taken(server)
    chat = server.stream("a", max_tokens=400)  # it outlasts what follows, also where the machine is busy
    chat.event()
    for number in range(3):
        prompt = f"{number}" + LONG
        assert server.complete(prompt, max_tokens=8, n=2)["choices"][1]["text"] == whole
    assert taken(server) - before >= 3 * 396
    assert of_replica(server, "generation_tokens_total")[0] == 4  # one each, which nobody gets
    short = of_replica(server, "prompt_tokens_total")[0]
    assert server.complete("abc", max_tokens=4)["choices"][0]["text"] == "defg"
    assert of_replica(server, "prompt_tokens_total")[0] == short  # it stays
    chat.drop()
    server.wait_until(server.idle)
    check_nothing_is_left(server, began)


def check_nothing_is_left(server: Served, since: float) -> None:
    """No file of KV that this user's engines have made since then stays; those of other tests go by themselves."""
    server.wait_until(lambda: not [path for path in Path("/dev/shm").glob("icc-kv-*") if is_ours(path, since)])


def is_ours(path: Path, since: float) -> bool:
    with contextlib.suppress(FileNotFoundError):
        found = path.stat()
        return found.st_uid == os.geteuid() and found.st_mtime >= since
    return False


@pytest.mark.usefixtures("moves")
@pytest.mark.parametrize("victim", [0, 1], ids=["prefill", "decode"])
def test_no_accepted_request_is_lost_with_a_replica(victim: int, start_faulty: StartServer) -> None:
    """While prompts are computed by one and a chat is answered by the other; the chat alone, which had begun, ends with
    an error where its own replica dies."""
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
    server.wait_until(lambda: of_replica(server, "prompt_tokens_total")[0] > before)  # it has one of them at least
    os.kill(server.engine_pids[victim], signal.SIGKILL)
    for thread in asking:
        thread.join()
    assert [answers[number]["choices"][0]["text"] for number in range(4)] == [expected] * 4, answers
    last = chat.rest()[-1]
    assert ("error" in last) == (victim == 1), last
    server.wait_until(lambda: server.metric("icc:engine_ready") == 2)
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

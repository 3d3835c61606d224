"""An engine of several ranks behind `icc serve`: if a rank is killed, running requests end, and all ranks start
again."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import icc
import psutil
import pytest

from .conftest import Served, StartServer


@pytest.fixture(scope="module")
def ranked_engine(chat_engine: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample model, compiled for two ranks."""
    sample = Path(__file__).parents[3] / "samples" / "pystd"
    output = tmp_path_factory.mktemp("ranked") / "toy.engine"
    return icc.compile(sample, output, target="native", quant="rtn4", tensor_parallel=2)


def ranks_of(server: Served) -> list[int]:
    """The process ids of ranks 1 and up; none while the engine restarts."""
    try:
        engine = psutil.Process(server.engine_pid)
        return [child.pid for child in engine.children() if "rank_main" in " ".join(child.cmdline())]
    except psutil.NoSuchProcess:
        return []


def test_a_rank_that_is_killed(start: StartServer, ranked_engine: Path) -> None:
    server = start(engine=ranked_engine)

    def ranks() -> list[int]:
        return ranks_of(server)

    wanted = server.complete("def f", max_tokens=8, temperature=0)["choices"][0]["text"]
    [rank] = ranks()
    stream = server.stream("def f", max_tokens=900, temperature=0, ignore_eos=True)
    assert "choices" in stream.event()
    os.kill(rank, signal.SIGKILL)
    [*_, end] = stream.rest()
    assert "the engine died" in end["error"]["message"]  # not the request's fault: with replicas it would run again
    server.wait_until(lambda: server.ask("GET", "/ready").status == 200 and ranks() not in ([], [rank]), 60)
    assert server.complete("def f", max_tokens=8, temperature=0)["choices"][0]["text"] == wanted
    assert not psutil.pid_exists(rank)
    server.wait_until(server.idle)
    [rank] = ranks()
    os.kill(rank, signal.SIGKILL)  # no request arrives: the next one finds all ranks
    server.wait_until(lambda: server.ask("GET", "/ready").status == 200 and ranks() not in ([], [rank]), 60)
    assert server.complete("def f", max_tokens=8, temperature=0)["choices"][0]["text"] == wanted
    assert "rank 1 has ended with -9: the engine ends" in server.log.read_text()


def test_a_rank_that_is_stopped(start: StartServer, ranked_engine: Path) -> None:
    """No request runs, so that no step waits for it; the watchdog ends the engine all the same, except if the rank
    continues."""
    server = start("--watchdog", "3", engine=ranked_engine)
    [rank] = ranks_of(server)
    os.kill(rank, signal.SIGSTOP)
    time.sleep(0.5)
    os.kill(rank, signal.SIGCONT)
    time.sleep(4)
    assert ranks_of(server) == [rank]
    os.kill(rank, signal.SIGSTOP)
    server.wait_until(lambda: server.ask("GET", "/ready").status == 200 and ranks_of(server) not in ([], [rank]), 30)
    assert server.complete("def f", max_tokens=8, temperature=0)["choices"][0]["text"]
    assert "hangs: it has said nothing for" in server.log.read_text()

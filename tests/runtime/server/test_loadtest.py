"""`icc bench serve`: the measurements match what happened."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from icc.runtime.loadtest.endpoint import Endpoint, Trace
from icc.runtime.loadtest.load import Level, Mix, PromptMaker
from icc.runtime.loadtest.summary import Slo, summarize
from icc.runtime.server.sizing.traffic import read_traffic

from .conftest import Served


def bench(server_url: str, *options: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "icc.compiler.cli", "bench", "serve", "--url", server_url, *options]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=90)


def test_a_run_counts_what_the_server_counts(served: Served, tmp_path: Path) -> None:
    tokens = served.metric("icc:generation_tokens_total")
    options = ["--rate", "40,80", "--burst", "3", "--concurrency", "4", "--requests", "12", "--price-per-hour", "3.6"]
    options += ["--prompt-tokens", "20:60", "--output-tokens", "5:9", "--json-file", "out.json", "--html", "out.html"]
    done = bench(served.url, *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["facts"]["model"] == "toy"
    assert [load["level"] for load in found["loads"]] == ["40/s in bursts of 3", "80/s in bursts of 3", "4 at a time"]
    for load in found["loads"]:
        assert load["ok"] == load["requests"] == 12 and not load["errors"]
        assert 12 * 5 <= load["output_tokens"] <= 12 * 9 and 12 * 15 <= load["prompt_tokens"] <= 12 * 75
        for times in ("ttft_ms", "token_ms", "e2e_ms"):
            assert 0 <= load[times]["p50"] <= load[times]["p90"] <= load[times]["p99"]
        cost = 0.001 * load["seconds"] / load["output_tokens"] * 1e6
        assert load["cost_per_million_output_tokens"] == pytest.approx(cost)
    reported = sum(load["output_tokens"] for load in found["loads"])
    assert served.metric("icc:generation_tokens_total") - tokens == reported + 4  # 2 + 2 learn the tokenizer

    page = (tmp_path / "out.html").read_text()
    assert page.count("<svg") in (2, 3) and page.count("<polyline") in (4, 6)  # none without times between tokens
    assert "src=" not in page and "href=" not in page and "url(" not in page
    served.wait_until(served.idle)


def test_chat_with_a_shared_prefix_hits_the_cache(served: Served, tmp_path: Path) -> None:
    options = ["--chat", "--concurrency", "2", "--requests", "6", "--prompt-tokens", "300", "--shared-tokens", "200"]
    done = bench(served.url, *options, "--output-tokens", "3", "--json", cwd=tmp_path)
    [load] = json.loads(done.stdout)["loads"]
    assert load["ok"] == 6 and load["cached_tokens"] > 6 * 150 - 350


def test_the_requests_of_a_load_as_traffic(served: Served, tmp_path: Path) -> None:
    options = ["--prompt-tokens", "20:60", "--output-tokens", "5:9", "--requests", "6", "--traffic-file", "traffic"]
    done = bench(served.url, "--rate", "40", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = read_traffic(tmp_path / "traffic")
    assert len(found) == 6 and found[0].time == 0 < found[-1].time
    assert all(15 <= one.prompt_tokens <= 75 and 5 <= one.output_tokens <= 9 for one in found)
    assert "of one load" in bench(served.url, "--rate", "40,50", *options, cwd=tmp_path).stderr
    served.wait_until(served.idle)


def test_a_server_that_is_not_there_and_wrong_options_get_a_line(tmp_path: Path) -> None:
    for options, code in (
        (["http://127.0.0.1:9", "--rate", "1"], 1),
        (["http://127.0.0.1:9"], 2),
        (["ftp://x", "--rate", "1"], 2),
        (["http://127.0.0.1:9", "--rate", "0"], 2),
        (["http://127.0.0.1:9", "--rate", "1", "--extra", "{"], 2),
    ):
        done = bench(*options, cwd=tmp_path)
        assert done.returncode == code and "Traceback" not in done.stderr, (options, done.stderr)


def test_a_summary_by_hand() -> None:
    traces = [
        Trace(due=0.0, sent=0.5, status=200, pieces=[1.0, 1.1, 1.4], end=1.5, prompt_tokens=10, output_tokens=5),
        Trace(due=1.0, sent=1.0, status=200, pieces=[1.2], end=1.3, prompt_tokens=20, output_tokens=1),
        Trace(due=1.0, sent=1.0, status=429, error="the queue is full", end=1.1),
        Trace(due=2.0, sent=2.0, error="ConnectionResetError: x", end=4.0),
    ]
    found = summarize("x", traces, Slo(ttft_ms=500, token_ms=50), price_per_hour=36.0)
    assert (found.requests, found.ok, found.errors) == (4, 2, {"429": 1, "ConnectionResetError": 1})
    assert found.seconds == 4.0 and found.output_tokens_per_s == 1.5 and found.input_tokens_per_s == 7.5
    assert found.ttft_ms["p50"] == pytest.approx(600)  # 1,000 ms from the due time, and 200 ms
    assert found.inter_token_ms["p50"] == pytest.approx(200) and found.e2e_ms["p99"] == pytest.approx(1500, rel=0.02)
    assert found.goodput_share == 0.25 and found.cost_per_million_output_tokens == pytest.approx(0.04 / 6 * 1e6)
    assert found.token_ms["p50"] == pytest.approx(50)  # 400 ms for 4 tokens; the other answer has one token


def test_prompts_have_the_wanted_lengths_and_share_their_beginning() -> None:
    prompts = PromptMaker(Mix((100, 200), (5, 7), shared_tokens=50), seed=1, tokens_per_word=1.25)
    drawn = [prompts.draw() for _ in range(50)]
    lengths = [len(text.split()) * 1.25 for text, _ in drawn]
    assert 98 <= min(lengths) < 120 and 180 < max(lengths) <= 202 and {output for _, output in drawn} == {5, 6, 7}
    assert len({" ".join(text.split()[:40]) for text, _ in drawn}) == 1
    assert len({text for text, _ in drawn}) == 50


def test_open_loads_are_poisson_or_bursts() -> None:
    from icc.runtime.loadtest import load

    dues: list[float] = []

    class Recorder(Endpoint):
        def __init__(self) -> None:
            super().__init__("http://x", "m")

        async def ask(self, prompt: str, max_tokens: int, due: float) -> Trace:
            dues.append(due)
            return Trace(due)

    import asyncio

    asyncio.run(load.run_level(Recorder(), Level(rate=2000, burst=4), PromptMaker(Mix(), 0, 1.0), 400))
    groups = np.array(dues).reshape(100, 4)
    assert (groups == groups[:, :1]).all()
    gaps = np.diff(groups[:, 0])
    assert 0.5 * 4 / 2000 < gaps.mean() < 2 * 4 / 2000 and 0.5 < gaps.std() / gaps.mean() < 1.6

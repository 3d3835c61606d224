"""`icc bench --batching`: when requests begin in each mode, and what is reported of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from icc.runtime.cli.commands import main
from icc.runtime.commands import batching as module
from icc.runtime.commands.batching import TimedRequest, run_batching
from icc.runtime.commands.options import MODES, BatchingOptions, BenchOptions
from icc.runtime.errors import UsageError
from icc.runtime.llm import LLM
from icc.runtime.loading import load

Make = Callable[..., Path]


class Clock:
    """A clock that steps (1 s) and sleeps (0.25 s) advance, so that the machine's speed does not matter."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        step = llm.driver.step

        def timed_step() -> None:
            step()
            self.now += 1.0

        monkeypatch.setattr(llm.driver, "step", timed_step)
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: self.now, sleep=self.sleep))

    def sleep(self, seconds: float) -> None:
        self.now += 0.25


# a step takes 1 s; a prompt takes one step, which gives its first token
REQUESTS = [
    TimedRequest(due, [1], tokens)
    for due, tokens in [(0.0, 2), (0.0, 6), (1.0, 2), (4.0, 2), (20.0, 1)]
]  # fmt: skip
STARTS = {
    "static": [0.0, 0.0, 6.0, 6.0, 20.0],  # pairs, until the longer one ends; the last one runs alone
    "dynamic": [0.0, 0.0, 6.0, 6.0, 20.0],
    "continuous": [0.0, 0.0, 2.0, 4.0, 20.0],  # as soon as a place is free
}


@pytest.mark.parametrize("mode", MODES)
def test_requests_begin_when_the_mode_lets_them(mode: str, make_engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    with load(make_engine()) as llm:
        clock = Clock(llm, monkeypatch)
        replay = module._Replay(llm, REQUESTS)
        while not replay.done:
            replay.start(module._DECIDE[mode](replay.look(), 2, 3.0))
            replay.step()
        assert [trace.sent for trace in replay.traces] == STARTS[mode]
        assert [trace.output_tokens for trace in replay.traces] == [2, 6, 2, 2, 1]
        assert [trace.end - trace.sent for trace in replay.traces] == [2.0, 6.0, 2.0, 2.0, 1.0]
        assert all(len(trace.pieces) == trace.output_tokens for trace in replay.traces)
        assert clock.now == 21.0


def test_a_static_batch_waits_to_be_full_and_a_dynamic_one_for_its_window(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [TimedRequest(due, [1], 1) for due in (0.0, 0.5, 10.0, 30.0)]
    with load(make_engine()) as llm:
        for mode, starts in (
            ("static", [10.0, 10.0, 10.0, 30.0]),
            ("dynamic", [2.0, 2.0, 12.0, 30.0]),  # the last request waits for no other
            ("continuous", [0.0, 1.0, 10.0, 30.0]),
        ):
            with monkeypatch.context() as patched:
                Clock(llm, patched)
                replay = module._Replay(llm, requests)
                while not replay.done:
                    replay.start(module._DECIDE[mode](replay.look(), 3, 2.0))
                    replay.step()
                assert [trace.sent for trace in replay.traces] == starts, mode


def test_all_modes_run_the_same_requests_at_the_same_times(make_engine: Make) -> None:
    options, told = BenchOptions(20, 16, (3,), seed=5), list[tuple[str, float, float]]()
    with load(make_engine()) as llm:
        asked = BatchingOptions(MODES, requests=12, rate=(200.0, 400.0), window_s=0.01)
        results = run_batching(llm, options, asked, lambda *now: told.append(now))
        again = module._requests(llm, module._lengths(options, 12), 5, 200.0)
        twice = module._requests(llm, module._lengths(options, 12), 5, 400.0)
        other = module._lengths(BenchOptions(20, 16, (3,), seed=6), 12)
        assert llm.loop.scheduler.num_running == 0
    assert [(one.rate, one.mode) for one in results] == [(rate, mode) for rate in (200.0, 400.0) for mode in MODES]
    assert len({(one.summary.prompt_tokens, one.summary.output_tokens) for one in results}) == 1
    assert all(one.summary.ok == 12 and one.ms_per_token > 0 and 0 < one.running <= 3 for one in results)
    assert all(one.summary.output_tokens == sum(request.output_tokens for request in again) for one in results)
    assert len(told) == 7 and [done for _, done, _ in told] == list(range(7)) and told[0][2] == 7
    assert [one.due for one in again] == pytest.approx([2 * one.due for one in twice])
    assert [one.prompt for one in again] == [one.prompt for one in twice]
    lengths = [(len(one.prompt), one.output_tokens) for one in again]
    assert lengths != other and all(1 <= prompt <= 20 and 1 <= output <= 16 for prompt, output in lengths)


def test_without_a_rate_there_are_three_of_what_the_engine_can_take(make_engine: Make) -> None:
    with load(make_engine()) as llm:
        asked = BatchingOptions(("continuous",), requests=6)
        results = run_batching(llm, BenchOptions(8, 8), asked)
    rates = [one.rate for one in results]
    assert [rate / rates[-1] for rate in rates] == pytest.approx([0.4, 0.7, 1.0])


def test_the_command_reports_a_table_and_one_chart(
    make_engine: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, page = str(make_engine()), tmp_path / "report.html"
    command = ["bench", root, "--prompt-tokens", "8", "--output-tokens", "8", "--requests", "6", "--rate", "300,600"]
    assert main([*command, "--batching", "continuous,static", "--html", str(page)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [
        ["300", "static"], ["300", "continuous"], ["600", "static"], ["600", "continuous"]
    ]  # fmt: skip
    text = page.read_text()
    assert text.count("<svg") == 1 and text.count("<polyline") == 2 and "http" not in text
    assert all(f">{name}</text>" in text for name in ("static", "continuous")) and "dynamic at" not in text
    assert main([*command, "--batching", "static,dynamic,continuous", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(one["rate"], one["mode"]) for one in found] == [(rate, mode) for rate in (300, 600) for mode in MODES]
    assert all(one["summary"]["ok"] == 6 for one in found)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--batching", "static,orca"], "'orca' is not static, dynamic or continuous"),
        (["--rate", "3"], "are of --batching"),
        (["--html", "x.html"], "are of --batching"),
        (["--batching", "static", "--batch-size", "1,2"], "at one batch size"),
        (["--batching", "static", "--prompts", "x.json"], "cannot be combined"),
        (["--batching", "static", "--requests", "0"], "--requests must be at least 1"),
        (["--batching", "static", "--html", "no/such/x.html"], "no/such is not a directory"),
        (["--batching", "static", "--requests", "1", "--html", "."], "cannot be written: Is a directory"),
        (["--batching", "static", "--window", "-1"], "--window at least 0"),
    ],
)
def test_what_cannot_be_is_a_line(
    options: list[str], words: str, make_engine: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    root = str(make_engine())
    assert main(["bench", root, "--prompt-tokens", "4", "--output-tokens", "4", *options]) == 2
    assert words in capsys.readouterr().err


def test_lengths_that_do_not_fit_are_refused_before_anything_runs(make_engine: Make) -> None:
    with load(make_engine()) as llm, pytest.raises(UsageError, match="exceed the engine"):
        run_batching(llm, BenchOptions(60, 60), BatchingOptions(("static",)))

"""The commands, as processes and through `icc.runtime.cli.commands`, and the cost of imports."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from icc.runtime.cli.commands import COMMANDS, main
from icc.runtime.commands.bench import BenchOptions, run_bench
from icc.runtime.commands.evaluate import evaluate_text, windows
from icc.runtime.errors import CapacityError, UsageError
from icc.runtime.executor.cpu.cores import usable_cores
from icc.runtime.format.manifest import EmbeddingFacts
from icc.runtime.loading import load

Make = Callable[..., Path]
HEAVY = ("torch", "transformers", "triton", "jinja2", "rich", "fastapi")
EMBEDDED_BAN = f"""
import sys
from importlib.machinery import PathFinder
class Ban:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {(*HEAVY, "icc")!r}:
            raise ImportError("banned: " + name)
        return PathFinder.find_spec(name, sys.argv[:1]) if name == "click" else None  # the engine's own, or none
sys.meta_path.insert(0, Ban())
import runpy
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def python(*arguments: str, check: bool = True, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], check=check, capture_output=True, text=True, env={**os.environ, **environment}
    )


def test_an_engine_runs_itself_without_icc_and_stays_as_it_was(make_engine: Make) -> None:
    root = make_engine(embed=True)
    before = sorted(root.rglob("*"))
    done = python("-c", EMBEDDED_BAN, str(root), "run", "-p", "abc", "--max-tokens", "4", PYTHONDONTWRITEBYTECODE="")
    assert done.stdout == "defg\n"
    assert python(str(root), "run", "-p", "abc", "--max-tokens", "4", PYTHONDONTWRITEBYTECODE="").stdout == "defg\n"
    assert "first token" in done.stderr and "tok/s" in done.stderr
    assert sorted(root.rglob("*")) == before
    assert python(str(root), "inspect", PYTHONPATH="").stdout.startswith("engine: ")


def test_an_engines_own_help_lists_what_it_can_do(make_engine: Make, capsys: pytest.CaptureFixture[str]) -> None:
    generating, embedding = make_engine(), make_engine("e.engine", embedding=EmbeddingFacts("last", True, 258))

    def help_of(engine: Path, *command: str) -> str:
        assert main([*command, "--help"], engine=str(engine)) == 0
        return capsys.readouterr().out

    def lacks(engine: Path) -> set[str]:
        shown = {line.split()[0] for line in help_of(engine).partition("Commands:\n")[2].splitlines()}
        return {name.split()[0] for name in COMMANDS} - shown

    chatting = make_engine("chat.engine", tokenizer_files={"chat_template.jinja": "{{ messages[0].content }}"})
    assert lacks(chatting) == {"serve", "batch"} and lacks(generating) == {"serve", "batch", "chat"}
    assert lacks(embedding) == {"serve", "batch", "chat", "run", "eval", "detect"}
    bare = make_engine("bare.engine", tokenizer_dir=None)
    assert lacks(bare) == {"serve", "batch", "chat", "eval", "detect"} and "--prompt" not in help_of(bare, "run")
    assert "--output-tokens" in help_of(generating, "bench") and " ENGINE\n" not in help_of(generating, "bench")
    shown = help_of(embedding, "bench")
    assert "--threads" in shown and not any(f"--{name}" in shown for name in ("output-tokens", "spec", "swap-gib"))
    assert main(["run", "-p", "a"], engine=str(embedding)) == 24
    assert "compiled for embeddings" in capsys.readouterr().err
    assert main(["serve"], engine=str(generating)) == 3
    assert "icc-llm[serve]" in capsys.readouterr().err


def test_run_prints_json_and_takes_ids(make_engine: Make, capsys: pytest.CaptureFixture[str]) -> None:
    root = str(make_engine())
    assert main(["run", root, "-p", "abc", "--max-tokens", "3", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["text"], shown["token_ids"], shown["finish_reason"]) == ("def", [100, 101, 102], "length")
    assert shown["ttft_ms"] > 0 and shown["prompt_tokens"] == 3
    assert main(["run", root, "--ids", "97,98", "--max-tokens", "2", "--threads", "1", "--isa", "any"]) == 0
    assert capsys.readouterr().out == "cd\n"
    bare = str(make_engine("bare.engine", tokenizer_dir=None))
    assert main(["run", bare, "--ids", "97,98", "--max-tokens", "2"]) == 0
    assert capsys.readouterr().out == "99 100 \n"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["run", "{nothing}", "-p", "a"], 20, "does not exist"),
        (["run", "{root}", "-p", "a", "--isa", "x"], 2, "no library for isa 'x'"),
        (["run", "{root}", "-p", "a", "--isa", "future"], 22, "need a_flag_that_no_cpu_has"),
        (["run", "{root}", "-p", "a", "--temperature", "-1"], 24, "temperature = -1.0"),
        (["run", "{root}", "--ids", "300"], 24, "token id 300"),
        (["run", "{root}", "-p", ""], 24, "the prompt is empty"),
        (["bench", "{root}", "--prompt-tokens", "60", "--output-tokens", "60"], 2, "exceed the engine's 64"),
        (["eval", "{root}", "--text", "{nothing}"], 2, "cannot be read"),
        (["inspect", "{nothing}"], 20, "does not exist"),
        (["inspect", "a prompt " * 500], 2, "File name too long"),
        (["eval", "{root}", "--text", "{root}"], 2, "cannot be read"),
    ],
)
def test_errors_are_a_line_and_a_code(
    make_engine: Make, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, message: str
) -> None:
    root = make_engine()
    filled = [argument.format(root=root, nothing=root / "nothing") for argument in arguments]
    assert main(filled) == code
    shown = capsys.readouterr()
    assert shown.err.startswith("error: ") and message in shown.err and "Traceback" not in shown.err
    assert len(shown.err.splitlines()) <= 2 and shown.out == ""


def test_more_threads_than_cores_are_warned_of(make_engine: Make, capsys: pytest.CaptureFixture[str]) -> None:
    command, cores = ["run", str(make_engine()), "--ids", "1,2", "--max-tokens", "1"], usable_cores()
    for threads, warnings in ((cores, 0), (cores + 1, 1)):
        assert main([*command, "--threads", str(threads)]) == 0
        assert capsys.readouterr().err.count(f"warning: --threads {threads} is slower than {cores}") == warnings


def test_bench_measures_each_batch_size(make_engine: Make, capsys: pytest.CaptureFixture[str]) -> None:
    root = str(make_engine())
    assert main(["bench", root, "--prompt-tokens", "20", "--output-tokens", "8", "--batch-size", "1,3", "--json"]) == 0
    results = json.loads(capsys.readouterr().out)
    assert [result["batch_size"] for result in results] == [1, 3]
    assert all(result["prefill_tokens_per_s"] > 0 and result["decode_tokens_per_s"] > 0 for result in results)
    assert main(["bench", root, "--prompt-tokens", "4", "--output-tokens", "1", "--rounds", "1"]) == 0
    assert "decode tok/s" in capsys.readouterr().out
    lengths = ["--prompt-tokens", "4", "--output-tokens", "2", "--rounds", "1"]
    assert main(["bench", root, *lengths, "--threads", "1,3", "--json"]) == 0
    assert [result["threads"] for result in json.loads(capsys.readouterr().out)] == [1, 3]
    assert main(["bench", root, *lengths, "--threads", "1,3"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["threads", "1", "3"]
    assert main(["bench", root, *lengths, "--threads", "1,3", "--batching", "static"]) == 2
    assert "single number of threads" in capsys.readouterr().err
    with load(root, kv_bytes=64 * 16) as llm:
        told: list[tuple[str, float, float]] = []
        run_bench(llm, BenchOptions(8, 4, (1, 2), rounds=2), lambda *now: told.append(now))
        assert [text for text, _, _ in told] == ["batch size 1"] * 3 + ["batch size 2"] * 3
        assert told[0][1] == 0 and all(before[1] < after[1] < after[2] for before, after in pairwise(told))
        with pytest.raises(CapacityError):
            run_bench(llm, BenchOptions(40, 20, (2,)))
        with pytest.raises(UsageError):
            run_bench(llm, BenchOptions(4, 4, (5,)))


@pytest.mark.parametrize("bos", [None, 256])
@pytest.mark.parametrize(("window", "stride"), [(None, None), (8, None), (8, 7), (16, 1), (2, 1)])
def test_eval_scores_each_token_once(
    make_engine: Make, bos: int | None, window: int | None, stride: int | None
) -> None:
    text = "abcdefgh" * 12 + "é"
    with load(make_engine(bos_token_id=bos)) as llm:
        result = evaluate_text(llm, text, window=window, stride=stride)
    raw = text.encode()
    assert result.tokens == len(raw) - (bos is None)
    # the toy predicts the byte after the last one: logit 10, all others 0
    window = window or 64
    room = window - (bos is not None)
    cut = windows(len(raw), room, stride or max(room // 2, 1))
    before = {
        index: raw[index - 1] if index > begin else bos for begin, first, end in cut for index in range(first, end)
    }
    hits = sum(last is not None and last + 1 == raw[index] for index, last in before.items())
    total = math.log(math.exp(10) + 257)
    misses = result.tokens - hits
    assert result.nll_per_token == pytest.approx((hits * (total - 10) + misses * total) / result.tokens, rel=1e-5)
    assert result.perplexity == pytest.approx(math.exp(result.nll_per_token))
    assert result.bits_per_byte == pytest.approx(result.nll_per_token * result.tokens / math.log(2) / result.bytes)


@pytest.mark.parametrize("count", [1, 5, 8, 9, 40])
@pytest.mark.parametrize(("room", "stride"), [(8, 4), (8, 8), (3, 1)])
def test_windows_partition_the_text(count: int, room: int, stride: int) -> None:
    cut = windows(count, room, stride)
    assert [index for _, first, end in cut for index in range(first, end)] == list(range(count))
    assert all(end - begin <= room and begin <= first for begin, first, end in cut)


def test_inspect_says_what_is_inside(make_engine: Make, capsys: pytest.CaptureFixture[str]) -> None:
    root = str(make_engine())
    assert main(["inspect", root, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["limits"] == {"max_seq_len": 64, "max_batch_size": 4, "max_step_tokens": 16}
    assert facts["kv_cache"]["bytes_per_token"] == 16 and facts["weights_bytes"] == {"i32": 64}
    assert [library["runs_here"] for library in facts["libraries"]] == [False, True]
    assert main(["inspect", root]) == 0
    assert "max_seq_len: 64" in capsys.readouterr().out


def loaded_after(code: str) -> set[str]:
    done = python("-c", f"{code}\nimport sys; print(*sorted({{name.split('.')[0] for name in sys.modules}}))")
    return set(done.stdout.split())


def test_importing_icc_loads_nothing_heavy() -> None:
    assert not loaded_after("import icc; icc.__version__; dir(icc)") & {*HEAVY, "numpy", "tokenizers", "msgspec"}
    assert not loaded_after("import icc; icc.load; icc.SamplingParams; icc.IccError") & set(HEAVY)
    assert not loaded_after("from icc.runtime.cli import bench, commands, evaluate, run, serve") & set(HEAVY)


def test_the_scheduler_needs_the_standard_library_alone() -> None:
    names = loaded_after("import icc.runtime.scheduler.scheduler")
    assert not names & {*HEAVY, "numpy", "tokenizers", "msgspec", "asyncio", "logging"}


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    import icc

    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        icc.nonsense  # noqa: B018

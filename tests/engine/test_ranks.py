"""Engines that several processes run together: the tokens of one process in all cases; the failure when a rank is
lost."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import icc
import numpy as np
import psutil
import pytest
from click.testing import CliRunner
from icc.compiler.cli import main
from icc.compiler.packing import pack_engine
from icc.runtime.errors import DeviceError, UsageError
from icc.runtime.executor.cpu.rank_group import cores_by_rank
from icc.runtime.executor.cpu.ranked import RankedDevice
from icc.runtime.format.load import open_engine, read_manifest
from icc.runtime.llm import LLM
from sizes import soak

PROMPTS = [[1, 5, 9], [3, 4, 7, 8, 2], [11, 12] * 20, [60, 3]]
GREEDY = icc.SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
SAMPLED = icc.SamplingParams(max_tokens=16, temperature=0.9, top_p=0.9, seed=7, ignore_eos=True)
KINDS = ["llama", *soak("gemma3", "deepseek_v3-latent_grouped_routing", "qwen3_next-delta_rule", "gpt_oss", "gpt2")]
Compiled = Callable[..., Any]


def tokens(llm: LLM, params: icc.SamplingParams = GREEDY) -> list[list[int]]:
    return [answer.token_ids for answer in llm.generate(PROMPTS, params)]


def difference(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).max() / np.abs(b).max())


def ranked(llm: LLM) -> RankedDevice:
    device = llm.executor.device  # type: ignore[attr-defined]
    assert isinstance(device, RankedDevice)
    return device


@pytest.mark.parametrize("name", KINDS)
def test_two_ranks_answer_as_one(name: str, compiled: Compiled, tmp_path: Path) -> None:
    one, two = compiled(name, max_seq_len=64), compiled(name, max_seq_len=64, tensor_parallel=2)
    ids = list(range(3, 40))
    with icc.load(one.engine) as llm:
        wanted, drawn, logits = tokens(llm), tokens(llm, SAMPLED), llm.logits(ids)
    pack_engine(two.engine, tmp_path / "two.icc")
    for engine in (two.engine, tmp_path / "two.icc"):
        with icc.load(engine, threads=2) as llm:
            assert tokens(llm) == wanted and tokens(llm, SAMPLED) == drawn
            assert difference(llm.logits(ids), logits) < 2e-5


@pytest.mark.parametrize("options", [{}, *soak({"quant": "rtn4"}, {"quant": "rtn4", "kv_cache": "int8"})])
def test_experts_keep_every_bit(options: dict[str, str], compiled: Compiled) -> None:
    one = compiled("mixtral", max_seq_len=64, **options)
    two = compiled("mixtral", max_seq_len=64, expert_parallel=2, **options)
    ids = list(range(3, 40))
    with icc.load(one.engine) as llm, icc.load(two.engine, threads=2) as both:
        assert tokens(llm) == tokens(both)
        assert np.array_equal(llm.logits(ids), both.logits(ids))


def test_codes_are_cut(compiled: Compiled) -> None:
    """--quant rtn4: each rank's file has about half of the bytes, and the answers are those of one rank."""
    one, two = (compiled("llama", max_seq_len=64, quant="rtn4", **more) for more in ({}, {"tensor_parallel": 2}))
    sizes = [(two.engine / name).stat().st_size for name in ("weights.safetensors", "weights-1.safetensors")]
    assert sizes[0] == sizes[1] < 0.8 * (one.engine / "weights.safetensors").stat().st_size
    with icc.load(one.engine) as llm, icc.load(two.engine) as both:
        ids = list(range(3, 40))
        assert difference(both.logits(ids), llm.logits(ids)) < 0.02  # int8 rows are rounded by other groups' maxima


TOP_K = icc.SamplingParams(max_tokens=24, temperature=1.0, top_k=12, top_p=0.9, min_p=0.02, seed=3, ignore_eos=True)
TOLD = icc.SamplingParams(max_tokens=24, temperature=0.0, logprobs=2, ignore_eos=True)


def test_rows_as_wide_as_the_vocabulary_do_not_travel(compiled: Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy tokens and those of top-k (also with top-p and min-p) are those of whole rows and of one rank; a rank
    sends 8 bytes per candidate instead of 4 per word. Whole rows are sent if a request needs more of them."""
    engine = compiled("llama", max_seq_len=64, tensor_parallel=2).engine
    words = read_vocabulary(engine) // 2
    asked = {"greedy": GREEDY, "top-k": TOP_K, "told": TOLD, "sampled": SAMPLED}
    given: dict[tuple[bool, str], int] = {}
    answers: dict[tuple[bool, str], list[list[int]]] = {}
    for merges in (True, False):
        monkeypatch.setattr(RankedDevice, "most_wanted", 128 if merges else 0)
        with icc.load(engine, threads=2) as llm:
            for name, params in asked.items():
                before = ranked(llm).given_bytes
                answers[merges, name] = tokens(llm, params)
                given[merges, name] = ranked(llm).given_bytes - before
    with icc.load(compiled("llama", max_seq_len=64).engine) as llm:
        for name, params in asked.items():
            assert answers[True, name] == answers[False, name] == tokens(llm, params)
    rows = len(PROMPTS) * 24
    assert given[False, "greedy"] - given[True, "greedy"] == rows * (4 * words - 8)
    assert given[False, "top-k"] - given[True, "top-k"] == rows * (4 * words - 8 * 12)
    assert given[False, "told"] == given[True, "told"] and given[False, "sampled"] == given[True, "sampled"]


def read_vocabulary(engine: Path) -> int:
    with icc.load(engine) as llm:
        return llm.executor.vocab_size


@pytest.mark.parametrize("policy", ["h2o:budget=64,recent=16", *soak("snapkv:budget=64,recent=16")])
def test_each_rank_gives_up_keys_of_its_own_heads(policy: str, compiled: Compiled) -> None:
    """Scores belong to one key head: ranks choose separately what one rank would choose for each head."""
    ids = [i * i % 113 + 3 for i in range(80)]
    params = icc.SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    options = {"max_seq_len": 128, "kv_policy": policy}
    found: list[tuple[list[int], np.ndarray]] = []
    for more in ({}, {"tensor_parallel": 2}):
        with icc.load(compiled("llama", **options, **more).engine, threads=2) as llm:
            found.append((list(llm.generate([ids], params)[0].token_ids), llm.logits(ids)))
    assert found[0][0] == found[1][0] and difference(found[1][1], found[0][1]) < 2e-5


def test_an_early_exit_guesses_for_ranks(compiled: Compiled) -> None:
    """--spec layer-skip: the exit is divided like the model, and runs on the ranks."""
    with icc.load(compiled("llama", max_seq_len=64).engine) as llm:
        wanted = tokens(llm)
    with icc.load(compiled("llama", max_seq_len=64, tensor_parallel=2, spec="layer-skip:1").engine, threads=2) as llm:
        assert llm.loop.speculator is not None
        llm.loop.speculator.adaptive = False  # guess at every step, whether or not it pays
        assert tokens(llm) == wanted and llm.loop.speculator.counts.accepted > 0


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random Medusa heads of a tiny llama."""
    import torch
    from icc.compiler.speculate.head_files import write_heads

    folder, source = tmp_path_factory.mktemp("heads"), torch.Generator().manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    for i in range(2):
        tensors[f"{i}.0.linear.weight"] = torch.randn(64, 64, generator=source) * 0.1
        tensors[f"{i}.0.linear.bias"] = torch.randn(64, generator=source) * 0.1
    write_heads(folder, tensors, {"medusa_num_heads": 2, "medusa_num_layers": 1})
    return folder


def test_heads_guess_for_ranks(compiled: Compiled, heads: Path) -> None:
    """--spec medusa: the tokens of one rank, and the heads' choices for the requested rows."""
    from icc.runtime.batch.scheduled import ScheduledBatch, ScheduledSequence

    ids = [3, 5, 9, 33, 70, 2, 8, 11, 90]
    found: list[tuple[list[list[int]], np.ndarray]] = []
    for more in ({}, {"tensor_parallel": 2}):
        engine = compiled("llama", max_seq_len=64, max_step_tokens=48, spec=f"medusa:{heads}", **more).engine
        with icc.load(engine, threads=2) as llm:
            answers = tokens(llm)
            tables = ((0,),) * len(llm.executor.groups)
            llm.executor.step(ScheduledBatch((ScheduledSequence(1, tuple(ids), 0, tables, len(ids)),)))
            rows = {"draft_rows": np.array([7, 2, 4], np.int32)}
            found.append((answers, llm.executor.run("medusa", rows)["drafts"]))  # type: ignore[attr-defined]
    assert found[0][0] == found[1][0] and np.array_equal(found[0][1], found[1][1])


def test_four_ranks_on_fewer_cores(compiled: Compiled) -> None:
    """Ranks that outnumber the cores take turns; here four ranks share two key heads."""
    with icc.load(compiled("llama", max_seq_len=64).engine) as llm:
        wanted = tokens(llm)
    with icc.load(compiled("llama", max_seq_len=64, tensor_parallel=4).engine) as llm:
        assert len(ranked(llm).group.pids) == 3  # type: ignore[union-attr]
        assert tokens(llm) == wanted


def test_the_manifest_says_what_each_rank_has(compiled: Compiled) -> None:
    manifest = read_manifest(compiled("llama", max_seq_len=64, tensor_parallel=2).engine)
    assert manifest.ranks == 2 and list(manifest.programs) == ["main", "main/1"]
    assert {entry.program for entry in manifest.programs.values()} == {"program.json"}
    assert {entry.weights for entry in manifest.programs.values()} <= manifest.files.keys()


def test_a_changed_file_of_another_rank_is_refused(compiled: Compiled, tmp_path: Path) -> None:
    import shutil

    engine = tmp_path / "engine"
    shutil.copytree(compiled("llama", max_seq_len=64, tensor_parallel=2).engine, engine)
    with (engine / "weights-1.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    with pytest.raises(icc.IccError, match=r"rank 1: weights-1\.safetensors has changed"):
        icc.load(engine)


@pytest.mark.parametrize("divided", ["tensor_parallel", "pipeline_parallel"])
def test_a_rank_that_dies_ends_the_engine(divided: str, compiled: Compiled) -> None:
    """The error says which rank; nothing waits forever, and no process is left."""
    llm = icc.load(compiled("llama", max_seq_len=64, **{divided: 2}).engine)
    device = ranked(llm)
    assert device.group is not None
    [pid] = device.group.pids
    llm.generate(PROMPTS[:1], GREEDY)
    os.kill(pid, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(DeviceError, match="rank 1 has ended with -9"):
        llm.generate(PROMPTS, GREEDY)
    assert time.monotonic() - began < 60  # not a measurement: it must not wait forever
    llm.close()
    assert not Path(f"/proc/{pid}").exists()


def test_ranks_end_with_rank_0(compiled: Compiled, tmp_path: Path) -> None:
    import subprocess
    import sys

    code = (
        "import icc, sys, time; llm = icc.load(sys.argv[1]); "
        "print(*llm.executor.device.group.pids, flush=True); time.sleep(60)"
    )
    engine = compiled("llama", max_seq_len=64, tensor_parallel=2).engine
    process = subprocess.Popen([sys.executable, "-c", code, str(engine)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    process.kill()
    process.wait()
    with suppress(psutil.NoSuchProcess):
        rank, end = psutil.Process(pid), time.monotonic() + 60
        while rank.status() != psutil.STATUS_ZOMBIE:  # a zombie if no parent waits for it
            assert time.monotonic() < end
            time.sleep(0.05)


def test_a_draft_engine_guesses_for_ranks(compiled: Compiled) -> None:
    draft = compiled("llama", max_seq_len=64).engine
    engine = compiled("llama", max_seq_len=64, tensor_parallel=2).engine
    with icc.load(engine) as llm:
        wanted = tokens(llm)
    for spec in (f"draft:{draft}", "ngram"):
        with icc.load(engine, spec=spec) as llm:
            assert tokens(llm) == wanted


def test_a_rank_does_not_run_alone(compiled: Compiled) -> None:
    engine = open_engine(compiled("llama", max_seq_len=64, tensor_parallel=2).engine)
    with pytest.raises(icc.IccError, match="is for rank 1 of several, and does not run alone"):
        engine.open_program("main/1")
    engine.close()


@pytest.mark.parametrize(
    "options, said",
    [
        ({"tensor_parallel": 2, "expert_parallel": 4}, "--tensor-parallel 2 and --expert-parallel 4 differ"),
        ({"tensor_parallel": 0}, "--tensor-parallel must be at least 1"),
        ({"sequence_parallel": True}, "--sequence-parallel divides what ranks of --tensor-parallel do alike"),
        ({"tensor_parallel": 65}, "65 ranks are more than the 64 that --target cpu can have"),
        (
            {"tensor_parallel": 2, "target": "h100", "spec": "layer-skip:1"},
            "--spec layer-skip:1 does not work with several ranks of a GPU",
        ),
        (
            {"tensor_parallel": 2, "target": "h100", "spec": "mtp"},
            "--spec mtp does not work with several ranks of a GPU",
        ),
        ({"pipeline_parallel": 2, "spec": "eagle:x"}, "--spec eagle:x does not work with --pipeline-parallel"),
        ({"tensor_parallel": 2, "tune": True, "target": "native"}, "--tune does not work with several ranks"),
        (
            {"tensor_parallel": 2, "target": "h100", "kv_policy": "h2o:budget=64,recent=16"},
            "--kv-policy h2o:budget=64,recent=16: there are no kernels for --target h100",
        ),
        ({"tensor_parallel": 9, "target": "h100"}, "9 ranks are more than the 8 that --target h100 can have"),
    ],
)
def test_what_ranks_do_not_do_is_refused(options: dict[str, Any], said: str) -> None:
    from icc.compiler.options import CompileOptions

    with pytest.raises(UsageError) as raised:
        CompileOptions(Path("m"), Path("e"), **options)
    assert said in raised.value.message


@pytest.mark.parametrize(
    ("options", "why"),
    [({"expert_parallel": 2}, "no experts"), ({"pipeline_parallel": 60}, "there are no 60 parts of the graph")],
)
def test_a_model_that_does_not_divide_is_refused(
    options: dict[str, Any], why: str, compiled: Compiled, tmp_path: Path
) -> None:
    """The refusal gives the reason, before anything is quantized."""
    checkpoint, stages = compiled("llama", max_seq_len=64).checkpoint, set[str]()
    with pytest.raises(UsageError, match="nothing of this model divides among") as raised:
        icc.compile(
            checkpoint, tmp_path / "engine", target="native", max_seq_len=64, quant="rtn4",
            progress=lambda p: stages.add(p.stage), **options,
        )  # fmt: skip
    assert why in str(raised.value.hint) and "quantize" not in stages
    assert not list(tmp_path.iterdir())


def test_inspect_tells_the_ranks(compiled: Compiled) -> None:
    engine = compiled("llama", max_seq_len=64, tensor_parallel=2).engine
    shown = CliRunner().invoke(main, ["inspect", str(engine)], catch_exceptions=False)
    assert shown.exit_code == 0 and "ranks: 2" in shown.stdout


def test_cores_of_ranks_are_their_own() -> None:
    mine = sorted(os.sched_getaffinity(0))
    found = cores_by_rank(2)
    if len(mine) >= 2 and found[0] is not None and found[1] is not None:
        assert not set(found[0]) & set(found[1]) and {*found[0], *found[1]} <= set(mine)
    assert cores_by_rank(len(mine) + 1) == [None] * (len(mine) + 1)


def test_prompts_by_rows(compiled: Compiled) -> None:
    """--sequence-parallel: logits of a long and of a short prompt, and tokens, are bit-equal to those of ranks with
    whole sums; the report counts the divided steps."""
    two, rows = (
        compiled("llama", max_seq_len=64, tensor_parallel=2, **more) for more in ({}, {"sequence_parallel": True})
    )
    found: list[tuple[list[list[int]], np.ndarray, np.ndarray]] = []
    for made in (two, rows):
        with icc.load(made.engine, threads=2) as llm:
            found.append((tokens(llm), llm.logits(list(range(3, 40))), llm.logits([5, 9, 33])))
    assert found[0][0] == found[1][0]
    assert all(np.array_equal(a, b) for a, b in zip(found[0][1:], found[1][1:], strict=True))
    passes = {entry["name"]: entry for entry in json.loads((rows.engine / "report.json").read_bytes())["passes"]}
    assert passes["sequence"]["counts"] == {"sums by rows": 5, "gathered": 5}

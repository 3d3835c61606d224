"""Pipeline stages: bit-equal to one rank; the weights and memory of each rank; the failure when a rank is lost."""

from __future__ import annotations

import ctypes
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import icc
import numpy as np
import pytest
from icc.compiler.options import CompileOptions
from icc.runtime.batch.scheduled import ScheduledBatch
from icc.runtime.errors import UsageError
from icc.runtime.executor.cpu.ranked import RankedDevice
from icc.runtime.format.kv import KVMemory
from icc.runtime.format.load import read_manifest
from icc.runtime.llm import LLM
from sizes import soak

PROMPTS = [[1, 5, 9], [3, 4, 7, 8, 2], [11, 12] * 20, [60, 3]]
GREEDY = icc.SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
SAMPLED = icc.SamplingParams(max_tokens=16, temperature=0.9, top_p=0.9, seed=7, ignore_eos=True)
KINDS = [
    ("llama", {}),
    *soak(
        ("llama", {"quant": "rtn4"}), ("mixtral", {}), ("gemma3", {}), ("deepseek_v3-latent_grouped_routing", {}),
        ("qwen3_next-delta_rule", {}), ("gpt_oss", {}), ("gpt2", {}),
    ),
]  # fmt: skip
Compiled = Callable[..., Any]


def tokens(llm: LLM, params: icc.SamplingParams = GREEDY) -> list[list[int]]:
    return [answer.token_ids for answer in llm.generate(PROMPTS, params)]


def ranked(llm: LLM) -> RankedDevice:
    device = llm.executor.device  # type: ignore[attr-defined]
    assert isinstance(device, RankedDevice)
    return device


@pytest.mark.parametrize(("name", "options"), KINDS)
def test_stages_keep_every_bit(name: str, options: dict[str, str], compiled: Compiled) -> None:
    """Greedy and sampled tokens and logits are those of one rank; n-grams and a cached prefix change nothing."""
    one = compiled(name, max_seq_len=64, **options)
    two = compiled(name, max_seq_len=64, pipeline_parallel=2, **options)
    ids = list(range(3, 40))
    with icc.load(one.engine) as llm:
        wanted, drawn, logits = tokens(llm), tokens(llm, SAMPLED), llm.logits(ids)
    with icc.load(two.engine, threads=2) as llm:
        assert tokens(llm) == wanted and tokens(llm, SAMPLED) == drawn
        assert tokens(llm) == wanted  # prompts are found in the prefix cache
        assert np.array_equal(llm.logits(ids), logits)
    with icc.load(two.engine, threads=2, spec="ngram") as llm:
        assert tokens(llm) == wanted


def test_stages_work_at_different_steps(compiled: Compiled) -> None:
    """Rank 0 begins a step before the previous one has ended: tokens (also sampled) and logits are those of one rank,
    with prompts in chunks; cancelled requests, and a cache for two requests only, do not change the others."""
    one = compiled("llama", max_seq_len=64).engine
    two = compiled("llama", max_seq_len=64, pipeline_parallel=2).engine
    ids = list(range(3, 60))
    with icc.load(one) as llm:
        wanted, drawn, logits = tokens(llm), tokens(llm, SAMPLED), llm.logits(ids)
    with icc.load(two, threads=2) as llm:
        if ranked(llm).turns == 1:
            pytest.skip("each stage needs a core of its own")
        under_way = _watched(llm)
        assert tokens(llm) == wanted and tokens(llm, SAMPLED) == drawn
        assert np.array_equal(llm.logits(ids), logits)
        assert max(under_way) == 2
        started = [llm.loop.add(prompt, GREEDY)[0] for prompt in PROMPTS]
        for _ in range(5):
            llm.loop.step()
        llm.loop.end(started[1])
        while llm.loop.has_work():
            llm.loop.step()
        assert [tuple(s.token_ids) for s in started if s is not started[1]] == [*wanted[:1], *wanted[2:]]
        layout, limits = ranked(llm).program.kv, llm.manifest.limits
        one_sequence = KVMemory(layout, layout.blocks_needed(limits, 1)).nbytes
    with icc.load(two, threads=2, kv_bytes=2 * one_sequence) as llm:
        under_way = _watched(llm)
        assert tokens(llm) == wanted and max(under_way) == 2
    with icc.load(two, threads=2, spec="ngram") as llm:
        under_way = _watched(llm)
        assert tokens(llm) == wanted and max(under_way) == 1


def _watched(llm: LLM) -> list[int]:
    """A list that gets the number of steps under way each time that one begins."""
    found, begin = list[int](), llm.executor.begin  # type: ignore[attr-defined]

    def watching(batch: ScheduledBatch, greedy: bool) -> Any:
        found.append(len(llm.loop.scheduler.under_way))
        return begin(batch, greedy)

    llm.executor.begin = watching  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize("count", [4, *soak(3, 7)])
def test_more_stages_than_cores(count: int, compiled: Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of 4 stages begin inside a layer, where wider rows are passed on. One step is under way; if each stage had
    its own cores, one per stage, each with an equal share of the sequences, rounded up."""
    with icc.load(compiled("llama", max_seq_len=64).engine) as llm:
        wanted = tokens(llm)
    with icc.load(compiled("llama", max_seq_len=64, pipeline_parallel=count).engine) as llm:
        assert len(ranked(llm).group.pids) == count - 1  # type: ignore[union-attr]
        assert tokens(llm) == wanted and ranked(llm).turns == (count if len(os.sched_getaffinity(0)) >= count else 1)
    cpus = sorted(os.sched_getaffinity(0))
    places = [[cpus[rank % len(cpus)]] for rank in range(count)]
    monkeypatch.setattr("icc.runtime.executor.cpu.ranked.cores_by_rank", lambda *_: places)
    with icc.load(compiled("llama", max_seq_len=64, pipeline_parallel=count).engine) as llm:
        under_way = _watched(llm)
        assert tokens(llm) == wanted and tokens(llm) == wanted
        share = -(-len(PROMPTS) // count)
        assert max(under_way) == -(-len(PROMPTS) // share)


@pytest.mark.parametrize(
    ("name", "options"),
    [("llama", {"tensor_parallel": 2}), *soak(("mixtral", {"expert_parallel": 2, "quant": "rtn4"}))],
)
def test_stages_of_several_ranks(name: str, options: dict[str, Any], compiled: Compiled) -> None:
    """Two stages of two ranks: the tokens of one rank, bit-equal to two ranks with all layers; each rank's file has its
    parts of its stage's weights."""
    quant = {key: value for key, value in options.items() if key == "quant"}
    one, two, four = (
        compiled(name, max_seq_len=64, **more) for more in (quant, options, {**options, "pipeline_parallel": 2})
    )
    ids = list(range(3, 40))
    with icc.load(one.engine) as llm:
        wanted, drawn = tokens(llm), tokens(llm, SAMPLED)
    with icc.load(two.engine, threads=2) as llm:
        logits = llm.logits(ids)
    with icc.load(four.engine) as llm:
        assert len(ranked(llm).group.pids) == 3  # type: ignore[union-attr]
        assert tokens(llm) == wanted and tokens(llm, SAMPLED) == drawn
        assert np.array_equal(llm.logits(ids), logits)
    sizes = [(four.engine / entry.weights).stat().st_size for entry in read_manifest(four.engine).programs.values()]
    # the first stage also has the embedding
    assert len(sizes) == 4 and max(sizes) < 0.65 * (two.engine / "weights.safetensors").stat().st_size


def test_a_rank_of_a_stage_that_dies_ends_the_engine(compiled: Compiled) -> None:
    """A lost rank ends the engine even while ranks of other stages wait for each other."""
    engine = compiled("llama", max_seq_len=64, tensor_parallel=2, pipeline_parallel=2).engine
    for rank in (1, 3):
        llm = icc.load(engine)
        llm.generate(PROMPTS[:1], GREEDY)
        pids = ranked(llm).group.pids  # type: ignore[union-attr]
        os.kill(pids[rank - 1], signal.SIGKILL)
        with pytest.raises(icc.IccError, match=f"rank {rank} has ended with -9"):
            llm.generate(PROMPTS, GREEDY)
        llm.close()
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_each_rank_has_the_weights_of_its_layers(compiled: Compiled) -> None:
    """Together they have each weight once, except position tables: this model ties none. The report says where the cut
    is."""
    one, two = compiled("llama", max_seq_len=64).engine, compiled("llama", max_seq_len=64, pipeline_parallel=2).engine
    manifest = read_manifest(two)
    assert manifest.ranks == 2 and all(entry.is_stage for entry in manifest.programs.values())
    names = [set(_header(two / entry.weights)) for entry in manifest.programs.values()]
    assert all(name.startswith("position_table") for name in names[0] & names[1])
    assert names[0] | names[1] == set(_header(one / "weights.safetensors"))
    layers = [{name.split(".layers.")[1][0] for name in own if ".layers." in name} for own in names]
    assert layers[0] | layers[1] == {"0", "1"}
    [report] = [p for p in json.loads((two / "report.json").read_bytes())["passes"] if p["name"] == "stages"]
    assert [r["reason"].split(" begins")[0] for r in report["refusals"]] == ["stage 0", "stage 1"]


def _header(file: Path) -> dict[str, Any]:
    with file.open("rb") as opened:
        return json.loads(opened.read(int.from_bytes(opened.read(8), "little")))


def test_a_stage_takes_memory_for_its_own_layers(compiled: Compiled) -> None:
    """Both ranks use the same block numbers; rank 0 never writes the cache of the other rank's layers."""
    with icc.load(compiled("llama", max_seq_len=64, pipeline_parallel=2).engine, kv_bytes=8 << 20) as llm:
        device = ranked(llm)
        tokens(llm)
        half = device.cache.nbytes // 2  # two layers, one after the other
        memory = [ctypes.string_at(device._kv.address + layer * half, half) for layer in (0, 1)]
    assert [any(layer) for layer in memory] == [True, False]


@pytest.mark.parametrize(
    "options, said",
    [
        (
            {"tensor_parallel": 2, "sequence_parallel": True},
            "--sequence-parallel does not work with --pipeline-parallel",
        ),
        ({"tensor_parallel": 33}, "66 ranks are more than the 64 that --target cpu can have"),
        ({"target": "h100"}, "there are no kernels of it for --target h100"),
    ],
)
def test_what_stages_do_not_do_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as raised:
        CompileOptions(Path("m"), Path("e"), pipeline_parallel=2, **options)
    assert said in raised.value.message


def test_more_stages_than_the_model_has_parts(compiled: Compiled, tmp_path: Path) -> None:
    checkpoint = compiled("llama", max_seq_len=64).checkpoint
    with pytest.raises(UsageError, match="nothing of this model divides among 60 ranks"):
        icc.compile(checkpoint, tmp_path / "engine", target="native", max_seq_len=64, pipeline_parallel=60)
    assert not list(tmp_path.iterdir())

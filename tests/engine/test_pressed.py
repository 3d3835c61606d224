"""Engines of every kind of cache under pressure: little memory, swaps, guesses, aborts; see tests/pressed.py."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import icc
import pytest
from icc.compiler.backends.cpu.toolchain import SANITIZER_FLAGS
from icc.runtime.batch.scheduled import ScheduledBatch
from icc.runtime.requests.generation import Generation
from icc.runtime.speculate.speculator import Speculator
from planted_drafter import TreeDrafter
from pressed import press
from sizes import size_of, soak

pytestmark = pytest.mark.slow

LIMITS = {"max_step_tokens": 48, "max_batch_size": 4}
HEADS = "with heads"  # of Medusa
STATES = [
    ("qwen3_next-delta_rule", {}),
    *soak(
        ("qwen3_next-delta_rule", {"spec": HEADS}),
        ("lfm2-short_convolutions", {"spec": HEADS}),
        ("kimi_linear-decay_per_row", {"spec": HEADS}),
        ("bamba-state_space", {"spec": HEADS}),
        ("jamba-selective_scan", {"state_cache": "bf16"}),
        ("recurrent_gemma-linear_recurrence", {"spec": HEADS}),
        ("rwkv-shifted_tokens", {}),
        ("xlstm-matrix_memory", {}),
        ("minimax-lightning_attention", {"kv_cache": "int4"}),
        ("zamba-heads_of_scans", {}),
        ("zaya-grouped_convolutions", {}),
    ),
]
CACHES = soak(
    ("deepseek_v3-latent_grouped_routing", {"kv_cache": "int8"}),
    ("deepseek_v32-picked_tokens", {}),
    ("gemma2", {"spec": HEADS}),
    ("gemma3n-sparse_activations", {}),
    ("gpt_oss", {"kv_cache": "int8"}),
    ("gemma2", {"kv_bits": 8.5, "calib_sequences": 4, "calib_length": 32}),
    ("llama4-chunks_and_scaled_inputs", {}),
    ("inkling-bias_of_queries", {}),
    ("llama", {"kv_policy": "streaming:sinks=4,window=40"}),
    ("llama", {"kv_policy": "h2o:budget=64,recent=16"}),
    ("llama", {"kv_policy": "snapkv:budget=64,recent=16"}),
)

SANITIZED = [
    ("qwen3_next-delta_rule", {}),
    ("lfm2-short_convolutions", {}),
    ("deepseek_v3-latent_grouped_routing", {"kv_cache": "int8"}),
    ("deepseek_v32-picked_tokens", {}),
    ("gemma2", {}),
    ("llama", {"kv_policy": "h2o:budget=64,recent=16"}),
    ("llama", {"kv_policy": "snapkv:budget=64,recent=16"}),
]
CHECKS = "address,undefined,float-cast-overflow"


@pytest.fixture
def heads(tmp_path: Path) -> str:
    """The folder of Medusa heads for tiny models, as `--spec` takes it."""
    import torch
    from icc.compiler.speculate.head_files import write_heads

    source, tensors = torch.Generator().manual_seed(0), {}
    for i in range(3):
        tensors[f"{i}.0.linear.weight"] = torch.randn(64, 64, generator=source) * 0.1
        tensors[f"{i}.0.linear.bias"] = torch.randn(64, generator=source) * 0.1
    write_heads(tmp_path, tensors, {"medusa_num_heads": 3, "medusa_num_layers": 1})
    return f"medusa:{tmp_path}"


def made(compiled: Callable[..., Any], name: str, options: dict[str, str], heads: str) -> Path:
    if options.get("spec") == HEADS:
        options = {**options, "spec": heads}
    return compiled(name, **LIMITS, **options).engine


@pytest.mark.parametrize(("name", "options"), [*STATES, *CACHES])
def test_answers_are_those_of_a_cold_engine(
    name: str, options: dict[str, str], compiled: Callable[..., Any], heads: str
) -> None:
    runs = size_of("pressed_runs")
    seen = press(made(compiled, name, options, heads), 1, runs)
    assert seen["length"] > 20 and seen["abort"] > 5 and seen["preempted"] > 5
    if runs > 20 and "kv_policy" not in options:  # caches that evict are not shared, swapped or guessed
        drafters = {"trees", "ngram", *(["medusa"] if options.get("spec") == HEADS else [])}
        kinds = ["cached", "swapped", "accepted", *(f"guesses of {drafter}" for drafter in drafters)]
        assert min(seen[kind] for kind in kinds) > 100, seen


@pytest.mark.soak
@pytest.mark.parametrize(("name", "options"), SANITIZED)
def test_under_sanitizers(
    name: str, options: dict[str, str], compiled: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs as above, with kernels that check their addresses and arithmetic, in a process that loads the sanitizer
    first."""
    library = subprocess.run(["g++", "-print-file-name=libasan.so"], capture_output=True, text=True).stdout.strip()
    if not os.path.isabs(library):
        pytest.skip("g++ has no libasan.so")
    compiler = tmp_path / "sanitizing"
    compiler.write_text(f'#!/bin/sh\nexec g++ "$@" -O1 -fsanitize={CHECKS} {" ".join(SANITIZER_FLAGS)}\n')
    compiler.chmod(0o755)
    checkpoint = compiled(name, **LIMITS, **options).checkpoint
    monkeypatch.setenv("CXX", str(compiler))
    engine = icc.compile(checkpoint, tmp_path / "engine", target="native", **LIMITS, **options)
    paths = os.pathsep.join([str(Path(icc.__file__).parents[1]), *sys.path])
    env = os.environ | {"LD_PRELOAD": library, "ASAN_OPTIONS": "detect_leaks=0", "PYTHONPATH": paths}
    command = [sys.executable, Path(__file__).parents[1] / "pressed.py", engine, "1", str(size_of("pressed_runs"))]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.parametrize(("name", "options"), STATES)
def test_a_rejected_guess_computes_nothing_of_the_prompt_again(
    name: str, options: dict[str, str], compiled: Callable[..., Any], heads: str
) -> None:
    """Each token of a prompt is computed once; only accepted guesses of an answer are computed twice."""
    prompts = [tuple(range(5, 75)), tuple(range(40, 75))]
    params = icc.SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    with icc.load(made(compiled, name, options, heads), threads=1, spec="none") as llm:
        truth: dict[Sequence[int], Sequence[int]] = {p: llm.generate([p], params)[0].token_ids for p in prompts}
        llm.loop.reset()
        computed: Counter[tuple[int, int]] = Counter()
        for step in ("step", "step_greedy"):
            setattr(llm.executor, step, counting(getattr(llm.executor, step), computed))
        llm.loop.speculator = Speculator(TreeDrafter(lambda g: truth[g.prompt], 0.5), adaptive=False)
        requests: list[Generation] = [llm.loop.add(prompt, params)[0] for prompt in prompts]
        while llm.loop.has_work():
            llm.loop.step()
        counts = llm.loop.speculator.counts
        assert counts.accepted > 5 and counts.guesses - counts.accepted > 20
    again = 0
    for request in requests:
        assert tuple(request.token_ids) == truth[request.prompt]
        times = [computed[request.request_id, at] for at in range(len(request.prompt) + 29)]
        assert times[: len(request.prompt)] == [1] * len(request.prompt)
        assert max(times) <= 2
        again += times.count(2)
    assert again <= counts.accepted


def counting(
    step: Callable[[ScheduledBatch], Any], computed: Counter[tuple[int, int]]
) -> Callable[[ScheduledBatch], Any]:
    """Wrap `step` so that it counts in `computed` how often each token of each request is computed, without guesses."""

    def run(batch: ScheduledBatch) -> Any:
        for sequence in batch.sequences:
            known = len(sequence.token_ids) - len(sequence.draft or ())
            computed.update((sequence.request_id, at) for at in range(sequence.start, sequence.start + known))
        return step(batch)

    return run

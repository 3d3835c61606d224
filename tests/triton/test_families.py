"""The launch plan, interpreted: logits and greedy tokens of every family equal those of the reference interpreter.

Batches mix prefill chunks with decodes; prompts share prefixes; few KV blocks force preemption.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from building import GpuEngine, build
from icc import SamplingParams
from icc.compiler.graph.interpret import interpret
from icc.compiler.graph.together import run_together
from icc.compiler.kv_formats import find_kv_format
from icc.passes.quantize.cache_damage import rounding
from icc.runtime.batch.scheduled import Draft
from icc.runtime.format.kv_numbers import KV_NUMBERS
from icc.runtime.format.manifest import Limits
from icc.runtime.scheduler.queues import Queues
from icc.runtime.speculate.speculator import Speculator
from planted_drafter import PlantedDrafter
from sizes import soak

pytestmark = pytest.mark.slow

FAMILIES = (
    "llama-mqa_tied_biases_llama3", "llama-linear", "mistral", "qwen2-window", "qwen3", "gemma2", "gemma3-odd_untied",
    "phi3-mha_partial_tied", "gpt2", "gpt_neox", "opt", "mixtral", "qwen3_moe", "gpt_oss-yarn_odd",
    "deepseek_v3-latent_grouped_routing", "lfm2-short_convolutions", "qwen3_next-delta_rule",
    "kimi_linear-decay_per_row", "bamba-state_space", "jamba-selective_scan",
    "recurrent_gemma-linear_recurrence", "rwkv-shifted_tokens", "xlstm-matrix_memory",
)  # fmt: skip
# Each has features of its own: learned positions, layer norms, biases; a recurrent state; experts, windows, sinks, odd
# sizes.
USUAL = [("opt", "none"), ("lfm2-short_convolutions", "none"), ("gpt_oss-yarn_odd", "awq4")]
OTHERS = [("qwen3", "gptq4")]
OTHERS += [(name, quant) for name in FAMILIES for quant in ("none", "awq4") if (name, quant) not in USUAL]
# float32 checkpoints compute in float32: only the order of additions differs
TOLERANCE = 5e-5
LIMITS = Limits(max_seq_len=20, max_batch_size=2, max_step_tokens=8)
FEW_BLOCKS = 5  # of 4 tokens: for one sequence of full length


@pytest.fixture(scope="module")
def engine_of(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def make(name: str, quant: str) -> GpuEngine:
        path: Path = tmp_path_factory.mktemp("model")
        tiny.save_tiny(tiny.tiny_configs()[name], path)
        return build(path, quant, LIMITS, block_size=4)

    return make


def greedy(engine: GpuEngine, ids: list[int], count: int) -> list[int]:
    """The first `count` greedy tokens of the reference interpreter, without a cache."""
    ids, start = list(ids), len(ids)
    for _ in range(count):
        ids.append(int(interpret(engine.graph, ids, [len(ids) - 1])[0].argmax()))
    return ids[start:]


@pytest.mark.parametrize(("name", "quant"), [*USUAL, *soak(*OTHERS)])
def test_equal_to_the_reference(name: str, quant: str, engine_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(name, quant)
    ids = np.random.default_rng(0).integers(3, 119, 13).tolist()
    expected = interpret(engine.graph, ids).numpy()
    preempted: list[int] = []
    preempt = Queues.preempt
    monkeypatch.setattr(Queues, "preempt", lambda self, r: (preempted.append(r.id), preempt(self, r)))
    with engine.llm(FEW_BLOCKS) as llm:
        found = llm.logits(ids)
        prompts = [ids[:7], ids[:7] + ids[:2]]
        together = llm.generate(prompts, SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True))
        grows = not all(group.holds_states for group in llm.executor.groups)
    error = np.abs(found - expected).max() / np.abs(expected).max()
    assert error < TOLERANCE, f"{name}: relative error {error:.1e}"
    assert [list(c.token_ids) for c in together] == [greedy(engine, p, 5) for p in prompts]
    assert preempted or not grows, "the blocks were meant to run out"


def branched(wrong: int, right: int, then: int) -> Draft:
    """A wrong guess and the right one, two guesses after the wrong one, one after the right one."""
    return Draft((wrong, right, 7, then, then), (-1, -1, 0, 1, 0))


@pytest.mark.parametrize("name", ["gemma2"])
def test_trees_of_guesses_change_no_token(name: str, engine_of: Any) -> None:
    """The interpreted plan verifies, samples and moves keys and values; with preemption."""
    engine = engine_of(name, "none")
    ids = np.random.default_rng(1).integers(3, 99, 13).tolist()
    prompts = [ids[:7], ids[:7] + ids[:2]]
    truth = {tuple(prompt): greedy(engine, prompt, 9) for prompt in prompts}
    with engine.llm(FEW_BLOCKS + 2) as llm:
        llm.loop.speculator = Speculator(PlantedDrafter(truth, branched), adaptive=False)
        together = llm.generate(prompts, SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True))
        assert [list(c.token_ids) for c in together] == list(truth.values())
        counts = llm.loop.speculator.counts
        assert counts.accepted >= 4


@pytest.mark.parametrize(("name", "kv"), soak(("llama-odd", "i8"), ("gemma2-odd", "f8")))
def test_codes_of_heads_of_odd_sizes(name: str, kv: str, tiny: Any, tmp_path: Path) -> None:
    """Rows of the cache are padded to 16 bytes, and so are blocks in the memory layout. Chunks read what earlier ones
    wrote."""
    tiny.save_tiny(tiny.tiny_configs()[name], tmp_path)
    engine = build(tmp_path, "none", LIMITS, block_size=4, kv=kv)
    for layer in engine.program.kv.groups[0].layers.values():
        assert layer.align == 16 and layer.key_dim % 16
        rows = layer.kv_heads * 4 * (-(-layer.key_dim // 16) - (-layer.value_dim // 16)) * 16
        assert layer.block_bytes(4, KV_NUMBERS[kv]) == -(-(rows + layer.kv_heads * 4 * 8) // 64) * 64
    ids = np.random.default_rng(0).integers(3, 119, 13).tolist()
    expected = interpret(engine.graph, ids).numpy()
    with engine.llm() as llm:
        found = llm.logits(ids)
    assert np.abs(found - expected).max() / np.abs(expected).max() < (0.02 if kv == "i8" else 0.1)


def test_layers_whose_caches_have_types_of_their_own(tiny: Any, tmp_path: Path) -> None:
    """Each cache is in a separate group, as with `--kv-bits`; one has a window."""
    tiny.save_tiny(tiny.tiny_configs()["gemma2"], tmp_path)
    engine = build(tmp_path, "none", LIMITS, block_size=4, kv_dtypes={0: "i8", 1: "i4"})
    assert [group.dtype for group in engine.program.kv.groups] == ["i8", "i4"]
    calls = [node for node in engine.graph.nodes if "paged_attention" in str(node.target)]
    kept = [dict(zip(calls, map(rounding, map(find_kv_format, ("i8", "i4"))), strict=True))]
    ids = np.random.default_rng(0).integers(3, 119, 13).tolist()
    plain, rounded = (found.logits.numpy() for found in run_together(engine.graph, [ids], kept))
    with engine.llm(FEW_BLOCKS) as llm:
        error = np.abs(llm.logits(ids) - rounded).mean()
    assert error < 0.3 * np.abs(plain - rounded).mean()  # halfway between two codes, either is right


def test_a_plan_that_ends_with_hidden_states(tiny: Any, tmp_path: Path) -> None:
    """No head and no sampling: vectors equal those of transformers' hidden states, in chunks and beside another
    prompt."""
    import torch

    oracle = tiny.save_tiny(tiny.tiny_configs()["llama-odd"], tmp_path / "whole").base_model
    oracle.save_pretrained(tmp_path / "headless")
    engine = build(tmp_path / "headless", "none", LIMITS, block_size=4, pooling="mean")
    assert engine.program.plan is not None and not any(phase.after for phase in engine.program.plan.phases)
    ids = np.random.default_rng(2).integers(3, 119, 13).tolist()
    with engine.llm() as llm:
        found = llm.embed([ids, ids[:5]])
    for prompt, vector in zip((ids, ids[:5]), found, strict=True):
        with torch.no_grad():
            hidden = oracle(input_ids=torch.tensor([prompt]), use_cache=False).last_hidden_state[0].mean(0)
        np.testing.assert_allclose(vector, (hidden / hidden.norm()).numpy(), atol=TOLERANCE)

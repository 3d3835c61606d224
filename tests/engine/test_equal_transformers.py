"""The engine's logits and greedy tokens are those of transformers, for every family that the issue names and more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import icc
import numpy as np
import pytest
import torch
from sizes import soak

pytestmark = pytest.mark.slow

FAMILIES = (
    "llama-mqa_tied_biases_llama3", "gemma3-odd_untied", "gpt_oss-yarn_odd", "deepseek_v3-latent_grouped_routing",
)  # fmt: skip
# families that need no kernel of their own, or that other tests of engines cover
OTHERS = (
    "llama-odd", "mistral", "qwen2-window", "qwen3", "qwen3_moe", "gemma2", "mixtral", "phi3-mha_partial_tied",
    "gpt_neox", "opt", "gpt2", "cohere-interleaved_rotary",
)  # fmt: skip
# float32 throughout: only the order of additions differs
TOLERANCE = 5e-5


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 119, length).tolist()


@pytest.mark.parametrize("name", [*FAMILIES, *soak(*OTHERS)])
def test_logits_and_greedy_tokens(name: str, compiled: Callable[..., Any], tiny: Any) -> None:
    engine, _, oracle = compiled(name, max_step_tokens=16)
    ids = prompt(37)
    expected = tiny.reference_logits(oracle, ids).numpy()
    with icc.load(engine, threads=2) as llm:
        found = llm.logits(ids)
        tokens = llm.generate([ids[:11]], icc.SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True))[
            0
        ].token_ids
    error = np.abs(found - expected).max() / np.abs(expected).max()
    assert error < TOLERANCE, f"{name}: relative error {error:.1e}"
    assert list(tokens) == _greedy(oracle, ids[:11], 10)


@pytest.mark.parametrize("name", ["gemma2", *soak("mixtral")])
def test_libraries_as_they_are_shipped(name: str, compiled: Callable[..., Any], tiny: Any, as_shipped: None) -> None:
    """With all optimizations of the C++ compiler; other tests use -O1."""
    test_logits_and_greedy_tokens(name, compiled, tiny)


def _greedy(oracle: Any, ids: list[int], count: int) -> list[int]:
    """The first `count` greedy tokens of transformers without a cache."""
    ids = list(ids)
    start = len(ids)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(oracle(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[start:]


@pytest.mark.parametrize("dtype", ["bfloat16", *soak("float16")])
def test_sixteen_bit_checkpoints_keep_their_weights(dtype: str, compiled: Callable[..., Any], tiny: Any) -> None:
    engine, _, oracle = compiled("llama", dtype=dtype, kv_cache="f32")
    ids = prompt(21)
    expected = tiny.reference_logits(oracle, ids).numpy()
    with icc.load(engine, threads=1) as llm:
        found = llm.logits(ids)
    assert np.abs(found - expected).max() / np.abs(expected).max() < TOLERANCE


@pytest.mark.parametrize(("kv_cache", "bound"), [("int8", 5e-2), *soak(("f16", 2e-3), ("bf16", 2e-2))])
def test_smaller_kv_caches_stay_close(kv_cache: str, bound: float, compiled: Callable[..., Any], tiny: Any) -> None:
    engine, _, oracle = compiled("llama", kv_cache=kv_cache)
    ids = prompt(40)
    expected = tiny.reference_logits(oracle, ids).numpy()
    with icc.load(engine, threads=2) as llm:
        found = llm.logits(ids)
    assert np.abs(found - expected).max() / np.abs(expected).max() < bound

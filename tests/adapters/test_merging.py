"""icc compile --lora: the numbers of transformers and peft for every kind of adapter, in the graph and in an engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import icc
import numpy as np
import pytest
import torch
from icc.compiler.frontend.load import load_graph
from icc.compiler.graph.interpret import interpret
from icc.compiler.merging import merge_adapter
from icc.runtime.adapters.adapter import Adapter, Change, LowRank
from icc.runtime.adapters.reader import read_adapter
from icc.runtime.errors import AdapterError
from peft_models import adapted_logits, difference, save_adapter

IDS = [5, 9, 33, 70, 2, 8, 14, 55, 101, 7, 3, 90]
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
Make = Callable[..., Path]
EXPERTS = ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]
GPT2 = {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True, "r": 4}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {"target_modules": PROJECTIONS, "r": 4}),
    "rslora": ("llama", {"target_modules": PROJECTIONS, "r": 8, "use_rslora": True, "lora_alpha": 3}),
    "patterns": (
        "gemma3", {"target_modules": PROJECTIONS, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"1.*": 32}},
    ),
    "dora": ("llama", {"target_modules": PROJECTIONS, "r": 4, "use_dora": True}),
    "dora of conv1d": ("gpt2", {**GPT2, "use_dora": True}),
    "dora of a table": ("llama", {"target_modules": ["embed_tokens", "q_proj"], "r": 3, "use_dora": True}),
    "dora of a table that is tied": ("gpt2", {**GPT2, "target_modules": ["wte", "c_attn"], "use_dora": True}),
    "conv1d": ("gpt2", GPT2),
    "conv1d with biases": ("gpt2", {**GPT2, "lora_bias": True}),
    "pissa": ("llama", {"target_modules": PROJECTIONS, "r": 4, "init_lora_weights": "pissa"}),
    "pissa of conv1d": ("gpt2", {**GPT2, "init_lora_weights": "pissa"}),
    "mica": ("llama", {"target_modules": PROJECTIONS, "r": 4, "init_lora_weights": "mica"}),
    "pissa beside a table": (
        "llama", {"target_modules": ["embed_tokens", "q_proj"], "r": 4, "init_lora_weights": "pissa"},
    ),
    "olora": ("llama", {"target_modules": PROJECTIONS, "r": 4, "init_lora_weights": "olora"}),
    "biases": ("llama", {"target_modules": PROJECTIONS, "r": 4, "lora_bias": True}),
    "the model's biases": ("qwen2", {"target_modules": ["q_proj"], "r": 4, "bias": "all"}),
    "saved modules": ("llama", {"target_modules": ["q_proj"], "r": 4, "modules_to_save": ["lm_head", "norm"]}),
    "saved and tied": ("gemma2", {"target_modules": ["q_proj"], "r": 4, "modules_to_save": ["embed_tokens"]}),
    "tokens": ("llama", {"target_modules": ["q_proj"], "r": 4, "trainable_token_indices": [5, 101]}),
    "tokens of a tied table": (
        "gemma2", {"target_modules": ["q_proj"], "r": 4, "trainable_token_indices": {"embed_tokens": [5, 101]}},
    ),
    "table and head": ("llama", {"target_modules": ["embed_tokens", "lm_head", "q_proj"], "r": 4}),
    "a table that is tied": ("gpt2", {**GPT2, "target_modules": ["wte", "c_attn"]}),
    "experts": (
        "qwen3_moe",
        {"target_modules": ["q_proj"], "target_parameters": EXPERTS, "r": 4},
    ),
    "some experts": ("mixtral", {"target_modules": [], "target_parameters": ["mlp.experts.gate_up_proj"], "r": 4}),
    "experts that lie turned": (
        "gpt_oss",
        {"target_modules": ["q_proj"], "target_parameters": EXPERTS, "r": 4},
    ),
    "one layer": ("llama", {"target_modules": ["q_proj"], "r": 4, "layers_to_transform": [1]}),
    "a hybrid": ("lfm2-short_convolutions", {"target_modules": ["in_proj", "out_proj", "w1", "w2", "q_proj"], "r": 4}),
    "another hybrid": ("bamba-state_space", {"target_modules": ["in_proj", "out_proj", "q_proj", "gate_proj"], "r": 4}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_numbers_are_those_of_peft(case: str, model: Callable[[str], Path], tmp_path: Path) -> None:
    family, options = CASES[case]
    path = save_adapter(model(family), tmp_path / "adapter", **options)
    graph = load_graph(model(family))
    before = interpret(graph, IDS)
    assert merge_adapter(graph, read_adapter(path)) == 0
    expected = adapted_logits(model(family), path, IDS)
    assert difference(expected, interpret(graph, IDS)) < 2e-5
    assert difference(expected, before) > 1e-3


@pytest.mark.parametrize("quant", ["none", "int8"])
def test_an_engine_of_it(quant: str, engine: Make, model: Callable[[str], Path], tmp_path: Path) -> None:
    path = save_adapter(model("llama"), tmp_path / "adapter", r=4, target_modules=PROJECTIONS, use_dora=True)
    with icc.load(engine("llama", lora=path, quant=quant, keep=("lm_head",) if quant != "none" else ())) as llm:
        found = torch.from_numpy(llm.logits(IDS))
    expected = adapted_logits(model("llama"), path, IDS)
    assert difference(expected, found) < (2e-5 if quant == "none" else 0.05)


def adapter(name: str, n: int, k: int, invocation: tuple[int, ...] = ()) -> Adapter:
    low = LowRank(np.ones((4, k), np.float32), np.ones((n, 4), np.float32), 1.0)
    return Adapter(Path("some/adapter"), b"", "", invocation, {name: Change(low_rank=low)})


def test_what_does_not_fit(model: Callable[[str], Path]) -> None:
    graph = load_graph(model("llama"))
    q = "model.layers.0.self_attn.q_proj.weight"
    for wrong, message in (
        (adapter(q.replace("q_proj", "qkv_proj"), 64, 64), "the model has no weight model.layers.0.self_attn.qkv_proj"),
        (adapter(q, 64, 32), r"q_proj.weight: B A is \[64, 32\], the weight \[64, 64\]"),
        (adapter(q, 64, 64, (3, 4)), "acts only after its invocation tokens"),
    ):
        with pytest.raises(AdapterError, match=message):
            merge_adapter(graph, wrong)


def test_layers_that_do_nothing_are_left_out(model: Callable[[str], Path]) -> None:
    """They are left out if nothing reads them, B is zeros, which changes no weight, and there are other layers."""
    q = "model.layers.0.self_attn.q_proj.weight"
    good, pooler = adapter(q, 64, 64), adapter("pooler.dense.weight", 64, 64).changes["pooler.dense.weight"]
    assert pooler.low_rank is not None
    idle = Change(low_rank=LowRank(pooler.low_rank.a, np.zeros((64, 4), np.float32), 1.0))
    told: list[str] = []
    both = Adapter(Path("some/adapter"), b"", "", (), {**good.changes, "pooler.dense.weight": idle})
    merge_adapter(load_graph(model("llama")), both, told.append)
    assert told == ["some/adapter: pooler.dense.weight left out: nothing here reads it, and its B is all zeros"]
    magnitudes = Change(low_rank=idle.low_rank, magnitude=np.ones(64, np.float32))
    for wrong in (pooler, magnitudes):
        changes = {**good.changes, "pooler.dense.weight": wrong}
        with pytest.raises(AdapterError, match=r"the model has no weight pooler\.dense"):
            merge_adapter(load_graph(model("llama")), Adapter(Path("some/adapter"), b"", "", (), changes))
    with pytest.raises(AdapterError, match=r"the model has no weight pooler\.dense"):
        alone = Adapter(Path("some/adapter"), b"", "", (), {"pooler.dense.weight": idle})
        merge_adapter(load_graph(model("llama")), alone, told.append)

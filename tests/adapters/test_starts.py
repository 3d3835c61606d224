"""Adapters whose training began by changing the base: the changed base is computed from the original."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from icc.compiler.adapter_starts import trained_over
from icc.compiler.frontend.load import load_graph
from icc.compiler.graph.interpret import interpret
from icc.compiler.merging import merge_adapter
from icc.runtime.adapters.adapter import LowRank, Start
from icc.runtime.adapters.reader import read_adapter
from icc.runtime.errors import AdapterError
from peft_models import adapted_logits, difference, save_adapter
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

FILE = Path(__file__).with_name("data") / "loftq.safetensors"  # benchmarks/record_loftq.py
IDS = [5, 9, 33, 70, 2, 8, 14, 55, 101, 7, 3, 90]
RECORDED = load_file(FILE)


@pytest.mark.parametrize("case", [name for name in RECORDED if name != "weight"])
def test_loftq_rounds_as_peft_and_bitsandbytes_do(case: str) -> None:
    bits, iterations = map(int, case.split("."))
    low = LowRank(np.zeros((4, 72), np.float32), np.zeros((24, 4), np.float32), 1.0)
    found = trained_over(RECORDED["weight"], Start("loftq", bits, iterations), low)
    assert difference(RECORDED[case], found) < 3e-7
    assert difference(RECORDED[case], RECORDED["weight"]) > (0.05 if bits == 4 else 1e-3)


def configure(adapter: Path, **fields: Any) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def test_logits_of_loftq(model: Callable[[str], Path], tmp_path: Path) -> None:
    """The logits are those of PEFT over a base that is rounded as LoftQ begins."""
    adapter = save_adapter(model("llama"), tmp_path / "adapter", r=4, target_modules=["q_proj", "down_proj"])
    base = AutoModelForCausalLM.from_pretrained(model("llama"), dtype=torch.float32)
    before = adapted_logits(model("llama"), adapter, IDS)
    low = LowRank(np.zeros((4, 1), np.float32), np.zeros((1, 4), np.float32), 1.0)
    for name, value in base.named_parameters():
        if "q_proj" in name or "down_proj" in name:
            value.data = trained_over(value.data, Start("loftq", 4, 2), low)
    base.save_pretrained(tmp_path / "rounded")
    expected = adapted_logits(tmp_path / "rounded", adapter, IDS)

    configure(adapter, init_lora_weights="loftq", loftq_config={"loftq_bits": 4, "loftq_iter": 2})
    graph = load_graph(model("llama"))
    merge_adapter(graph, read_adapter(adapter))
    assert difference(expected, interpret(graph, IDS)) < 2e-5
    assert difference(expected, before) > 1e-3


def test_pissa_by_iterations_is_not_the_same_twice(model: Callable[[str], Path], tmp_path: Path) -> None:
    """The reason why it is refused: what PEFT subtracts from the base when it loads one depends on random numbers."""
    adapter = save_adapter(model("llama"), tmp_path / "adapter", r=4, target_modules=["q_proj", "down_proj"])
    configure(adapter, init_lora_weights="pissa_niter_2")
    found: list[torch.Tensor] = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        found.append(adapted_logits(model("llama"), adapter, IDS))
    assert difference(*found) > 1e-3
    with pytest.raises(AdapterError, match="random numbers") as error:
        read_adapter(adapter)
    assert "path_initial_model_for_weight_conversion" in (error.value.hint or "")


def test_corda_is_refused_until_peft_has_converted_it(model: Callable[[str], Path], tmp_path: Path) -> None:
    """The changed base depends on inputs that the files do not have: PEFT itself cannot load one without them.
    Converted with the initial A and B, as the refusal says, it is a LoRA, with the logits of the model that was
    trained."""
    from peft import LoraConfig, get_peft_model
    from peft.tuners.lora.config import CordaConfig
    from peft.tuners.lora.corda import preprocess_corda

    config = LoraConfig(
        target_modules=["q_proj", "down_proj"], r=4, init_lora_weights="corda", corda_config=CordaConfig(verbose=False)
    )
    base = AutoModelForCausalLM.from_pretrained(model("llama"), dtype=torch.float32)
    ids = torch.tensor([IDS])
    preprocess_corda(base, config, lambda: base(input_ids=ids))
    trained = get_peft_model(base, config)
    began, adapter, converted = (tmp_path / name for name in ("began", "adapter", "converted"))
    trained.save_pretrained(began)
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, value in trained.named_parameters():
            if "lora_" in name:
                value += 0.05 * torch.randn(value.shape, generator=random)
        expected = trained.eval()(input_ids=ids).logits[0]
    trained.save_pretrained(adapter)
    with pytest.raises(AdapterError, match="what a text said of its inputs") as error:
        read_adapter(adapter)
    assert "path_initial_model_for_weight_conversion" in (error.value.hint or "")
    with pytest.raises(ValueError, match="eigens"):
        adapted_logits(model("llama"), adapter, IDS)

    configure(began, init_lora_weights=True)  # otherwise PEFT would change the base once more
    trained.save_pretrained(converted, path_initial_model_for_weight_conversion=str(began))
    graph = load_graph(model("llama"))
    before = interpret(graph, IDS)
    merge_adapter(graph, read_adapter(converted))
    assert difference(expected, interpret(graph, IDS)) < 2e-5
    assert difference(expected, before) > 1e-3


@pytest.mark.parametrize("kind", ["pissa", "olora", "loftq"])
def test_experts_do_not_begin_so(kind: str, model: Callable[[str], Path], tmp_path: Path) -> None:
    options = {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.down_proj"], "r": 4}
    adapter = save_adapter(model("qwen3_moe"), tmp_path / "adapter", **options)
    configure(adapter, init_lora_weights=kind)
    with pytest.raises(AdapterError, match=f"experts.down_proj cannot begin as init_lora_weights says, {kind!r}"):
        read_adapter(adapter)

"""Adapters over quantized bases: the numbers of peft over the dequantized base."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import icc
import pytest
import torch
import transformers
from icc.compiler.driver import compile_engine
from icc.compiler.frontend.load import load_graph
from icc.compiler.graph.interpret import interpret
from icc.compiler.merging import merge_adapter
from icc.compiler.options import CompileOptions
from icc.compiler.progress import Reporter
from icc.compiler.weights.handles import QuantizedWeight
from icc.passes import pipelines
from icc.passes.base import PassContext
from icc.passes.manager import run_passes
from icc.runtime.adapters.reader import read_adapter
from peft_models import adapted_logits, difference, save_adapter
from sizes import soak

IDS = [5, 9, 33, 70, 2, 8, 14, 55, 101, 7, 3, 90]
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
WITH_EXPERTS = {"r": 4, "target_modules": ["q_proj", "o_proj"], "target_parameters": EXPERTS}
FAMILIES: dict[str, tuple[dict[str, Any], str]] = {
    "gemma3": ({"r": 4, "target_modules": [*ATTENTION, "gate_proj", "up_proj", "down_proj"]}, "1x16"),
    "qwen2_moe": (WITH_EXPERTS, "1x16:q_proj,o_proj,experts.*"),
    "mixtral": (WITH_EXPERTS, "1x16:q_proj,o_proj,experts.*"),
    "gpt2": ({"r": 4, "target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}, "1x16"),
    "lfm2-short_convolutions": ({"r": 4, "target_modules": ["in_proj", "out_proj", "w1", "w2", "q_proj"]}, "1x16"),
}


@pytest.fixture(scope="module")
def base(tiny: Any, model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A tiny checkpoint of a family."""
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family != "qwen2_moe":
            return model(family)
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family) / "model"
            sizes = {"vocab_size": 120, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
            sizes |= {"num_key_value_heads": 2, "intermediate_size": 96, "moe_intermediate_size": 32}
            sizes |= {"num_experts": 4, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 96}
            tiny.save_tiny(transformers.Qwen2MoeConfig(**sizes), made[family])
        return made[family]

    return make


def save_dequantized(checkpoint: Path, folder: Path, quant: str) -> Path:
    """Save the checkpoint with the values that a calibration-free quantization gives its layers, except the head."""
    graph = load_graph(checkpoint)
    for phase in (pipelines.canonicalize(), pipelines.quantize(quant, "none", (), ())):
        run_passes(graph, phase, PassContext())
    values = {name.partition("#")[0]: w.load() for name, w in graph.weights.items() if isinstance(w, QuantizedWeight)}
    found = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    parameters = dict(found.named_parameters())
    assert len(values) > 6 and set(values) <= set(parameters)
    for name, value in values.items():
        turned = (
            parameters[name].shape != value.shape
            or type(found.get_submodule(name.rpartition(".")[0])).__name__ == "Conv1D"
        )
        parameters[name].data.copy_(value.T if turned else value)
    found.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", ["gpt2", "lfm2-short_convolutions", *soak("gemma3", "qwen2_moe", "mixtral")])
def test_at_run_time(family: str, base: Callable[[str], Path], tmp_path: Path) -> None:
    """fp8, whose products take float32 rows, so that only the weights are rounded."""
    config, room = FAMILIES[family]
    dequantized = save_dequantized(base(family), tmp_path / "base", "fp8")
    adapter = save_adapter(base(family), tmp_path / "adapter", **config)
    options: dict[str, Any] = {"quant": "fp8", "quant_head": "none", "adapters": room, "max_seq_len": 64}
    compile_engine(CompileOptions(base(family), tmp_path / "engine", "native", **options), Reporter())
    with icc.load(tmp_path / "engine") as llm:
        llm.load_adapter("own", adapter)
        expected = adapted_logits(dequantized, adapter, IDS)
        assert difference(expected, torch.from_numpy(llm.logits(IDS, adapter="own"))) < 2e-5
        assert difference(expected, torch.from_numpy(llm.logits(IDS))) > 1e-3
        assert difference(expected, adapted_logits(base(family), adapter, IDS)) > 1e-3


@pytest.mark.parametrize("family", ["gpt2", "mixtral", *soak("gemma3", "qwen2_moe", "lfm2-short_convolutions")])
def test_merged(family: str, base: Callable[[str], Path], tmp_path: Path) -> None:
    """A merged adapter is quantized with the base: the result is peft's merged model, quantized."""
    adapter = save_adapter(base(family), tmp_path / "adapter", **FAMILIES[family][0])
    graph = load_graph(base(family))
    merge_adapter(graph, read_adapter(adapter))
    for phase in (pipelines.canonicalize(), pipelines.quantize("rtn4", "none", (), ())):
        run_passes(graph, phase, PassContext())
    merged = save_merged(base(family), adapter, tmp_path / "merged")
    rounded = save_dequantized(merged, tmp_path / "rounded", "rtn4")
    model = transformers.AutoModelForCausalLM.from_pretrained(rounded, dtype=torch.float32)
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([IDS])).logits[0]
    assert difference(expected, interpret(graph, IDS)) < 2e-5


def save_merged(checkpoint: Path, adapter: Path, folder: Path) -> Path:
    """Save the model that peft's merge_and_unload makes."""
    from peft import PeftModel

    found = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    PeftModel.from_pretrained(found, adapter).merge_and_unload().save_pretrained(folder)
    return folder

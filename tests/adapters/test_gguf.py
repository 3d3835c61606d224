"""Adapters of llama.cpp, merged and at run time: the numbers of transformers and peft for the adapters that they were
converted from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import icc
import numpy as np
import pytest
from gguf_adapters import convert, convert_experts, write_adapter
from icc.compiler.frontend.load import load_graph
from icc.compiler.frontend.source.source import open_source
from icc.compiler.graph.interpret import interpret
from icc.compiler.merging import merge_adapter, read_for
from icc.runtime.errors import AdapterError
from peft_models import adapted_logits, save_adapter
from safetensors.numpy import load_file, save_file
from sizes import soak

IDS = [5, 9, 33, 70, 2, 8, 14, 55, 101, 7, 3, 90]
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
EXPERTS = ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]
GPT2 = {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True, "r": 4}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "rows of heads in turns": ("llama", "llama", {"target_modules": PROJECTIONS, "r": 4, "lora_alpha": 3}),
    "table and head": ("llama", "llama", {"target_modules": ["q_proj", "embed_tokens", "lm_head"], "r": 4}),
    "order as it is": ("qwen2", "qwen2", {"target_modules": PROJECTIONS, "r": 4}),
    "gemma": ("gemma3", "gemma3", {"target_modules": PROJECTIONS, "r": 4}),
    "turned": ("gpt2", "gpt2", GPT2),
}
Make = Callable[..., Path]


def difference(expected: Any, found: Any) -> float:
    wanted = np.asarray(expected)
    return float(np.abs(np.asarray(found) - wanted).max() / np.abs(wanted).max())


def merged(model: Path, path: Path) -> np.ndarray:
    graph = load_graph(model)
    merge_adapter(graph, read_for(graph, open_source(model), path))
    return interpret(graph, IDS).numpy()


@pytest.mark.parametrize("case", CASES)
def test_merged(case: str, model: Callable[[str], Path], tmp_path: Path) -> None:
    family, arch, options = CASES[case]
    path = save_adapter(model(family), tmp_path / "adapter", **options)
    file = convert(path, model(family), tmp_path / "adapter.gguf", arch)
    assert difference(adapted_logits(model(family), path, IDS), merged(model(family), file)) < 2e-5


def test_merged_experts(model: Callable[[str], Path], tmp_path: Path) -> None:
    path = save_adapter(model("qwen3_moe"), tmp_path / "adapter", target_modules=[], target_parameters=EXPERTS, r=4)
    experts = open_source(model("qwen3_moe")).config.num_experts
    file = convert_experts(path, tmp_path / "adapter.gguf", "qwen3moe", experts)
    assert difference(adapted_logits(model("qwen3_moe"), path, IDS), merged(model("qwen3_moe"), file)) < 2e-5


def test_of_halves_one_may_stay_as_it_is(model: Callable[[str], Path], tmp_path: Path) -> None:
    """An adapter of experts may lack the gate: the result is as if the gate's B were zeros."""
    path = save_adapter(model("qwen3_moe"), tmp_path / "adapter", target_modules=[], target_parameters=EXPERTS, r=4)
    experts = open_source(model("qwen3_moe")).config.num_experts
    file = convert_experts(path, tmp_path / "adapter.gguf", "qwen3moe", experts, left_out="gate")
    tensors = load_file(path / "adapter_model.safetensors")
    for name, value in tensors.items():
        if name.endswith(".base_layer.lora_B.weight"):
            value[: len(value) // 2] = 0
    save_file(tensors, path / "adapter_model.safetensors")
    assert difference(adapted_logits(model("qwen3_moe"), path, IDS), merged(model("qwen3_moe"), file)) < 2e-5


@pytest.mark.parametrize("case", ["rows of heads in turns", *soak("order as it is", "gemma", "turned")])
def test_at_run_time(case: str, engine: Make, model: Callable[[str], Path], tmp_path: Path) -> None:
    family, arch, options = CASES[case]
    path = save_adapter(model(family), tmp_path / "adapter", **options)
    file = convert(path, model(family), tmp_path / "adapter.gguf", arch)
    with icc.load(engine(family, adapters="2x16")) as llm:
        base = llm.logits(IDS)
        llm.load_adapter("one", file)
        expected, found = adapted_logits(model(family), path, IDS), llm.logits(IDS, adapter="one")
        assert difference(expected, found) < 2e-5 < difference(expected, base)
        assert np.array_equal(llm.logits(IDS), base)
        for kind, most in (("F16", 2e-3), ("BF16", 2e-2)):
            llm.load_adapter(kind, convert(path, model(family), tmp_path / f"{kind}.gguf", arch, kind))
            assert difference(expected, llm.logits(IDS, adapter=kind)) < most


def test_q8_0_and_an_invocation(engine: Make, model: Callable[[str], Path], tmp_path: Path) -> None:
    options = {"r": 32, "target_modules": ["q_proj", "v_proj"]}
    path = save_adapter(model("llama"), tmp_path / "adapter", **options)
    file = convert(path, model("llama"), tmp_path / "adapter.gguf", "llama", "Q8_0", invocation=IDS[6:8])
    with icc.load(engine("llama", adapters="2x32")) as llm:
        llm.load_adapter("one", file)
        base, found = llm.logits(IDS), llm.logits(IDS, adapter="one")
        assert np.array_equal(base[:6], found[:6]) and difference(base[6:], found[6:]) > 1e-3
        llm.load_adapter("whole", convert(path, model("llama"), tmp_path / "whole.gguf", "llama", "Q8_0"))
        assert difference(adapted_logits(model("llama"), path, IDS), llm.logits(IDS, adapter="whole")) < 1e-2


def test_over_a_gguf_model(tmp_path: Path, model: Callable[[str], Path], engine: Make, tiny: Any) -> None:
    """The model is a GGUF file, too: merged and at run time, the adapter file gives the same numbers as over
    the checkpoint."""
    from gguf_models import write_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model("llama"))
    write_model(base, "llama", tmp_path / "model.gguf", lambda name: "F32")
    path = save_adapter(model("llama"), tmp_path / "adapter", r=4, target_modules=PROJECTIONS)
    file = convert(path, model("llama"), tmp_path / "adapter.gguf", "llama")
    expected = adapted_logits(model("llama"), path, IDS)
    assert difference(expected, merged(tmp_path / "model.gguf", file)) < 2e-5
    options = {"target": "native", "max_seq_len": 64, "adapters": "2x16"}
    with icc.load(icc.compile(tmp_path / "model.gguf", tmp_path / "model.engine", **options)) as llm:
        llm.load_adapter("one", file)
        llm.load_adapter("peft", path)
        assert difference(expected, llm.logits(IDS, adapter="one")) < 2e-5
        assert np.array_equal(llm.logits(IDS, adapter="one"), llm.logits(IDS, adapter="peft"))


def test_what_is_refused(engine: Make, model: Callable[[str], Path], tmp_path: Path) -> None:
    q, a, b = "blk.0.attn_q.weight", np.ones((4, 64)), np.ones((64, 4))
    good = {f"{q}.lora_a": a, f"{q}.lora_b": b}
    unknown = {"blk.0.attn_nothing.weight.lora_a": a, "blk.0.attn_nothing.weight.lora_b": b}
    nan = {**good, f"{q}.lora_b": np.full((64, 4), np.nan)}
    cases: list[tuple[dict[str, np.ndarray], dict[str, Any], str]] = [
        (good, {"type": "model"}, "is no adapter: general.type is 'model'"),
        (good, {"adapter_type": "lokr"}, "adapter.type is 'lokr'"),
        (good, {"architecture": "qwen2"}, "made for the architecture 'qwen2', the model's is 'llama'"),
        (good, {"adapter.new": "x"}, "does not know the key 'adapter.new'"),
        ({f"{q}.lora_a": a}, {}, "'blk.0.attn_q.weight.lora_a' is not used: its other half is missing"),
        (unknown, {}, "'blk.0.attn_nothing.weight' is not used"),
        ({"blk.0.attn_norm.weight": np.ones(64)}, {}, "'blk.0.attn_norm.weight' is not used"),
        ({**good, f"{q}.lora_b": np.ones((64, 3))}, {}, "are no product"),
        ({**good, f"{q}.lora_b": np.ones((32, 4))}, {}, "has 32 rows, the model 64"),
        (nan, {}, "has values that are not finite"),
    ]
    with icc.load(engine("llama", adapters="2x16")) as llm:
        for number, (tensors, said, words) in enumerate(cases):
            path = write_adapter(tmp_path / f"{number}.gguf", "llama", 8.0, tensors, **said)
            with pytest.raises(AdapterError, match=words):
                llm.load_adapter("bad", path)
        (tmp_path / "short.gguf").write_bytes((tmp_path / "0.gguf").read_bytes()[:-300])
        with pytest.raises(AdapterError, match="at bytes"):
            llm.load_adapter("bad", tmp_path / "short.gguf")
        (tmp_path / "text.gguf").write_text("no gguf file at all, but text")
        with pytest.raises(AdapterError, match="is not a GGUF file"):
            llm.load_adapter("bad", tmp_path / "text.gguf")
        assert llm.adapters is not None and not llm.adapters.names

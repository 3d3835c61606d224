"""Adapters that change single experts, for models whose experts are now one fused weight."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import icc
import numpy as np
import pytest
from icc.compiler.frontend.load import load_graph
from icc.compiler.graph.interpret import interpret
from icc.compiler.merging import merge_adapter
from icc.runtime.adapters.adapter import Adapter, Change, LowRank
from icc.runtime.adapters.experts import with_experts_together
from icc.runtime.adapters.reader import read_adapter
from icc.runtime.errors import AdapterError, RequestError
from peft_models import adapted_logits, save_adapter
from safetensors.numpy import load_file, save_file
from sizes import usual

IDS = [5, 9, 33, 70, 2, 8, 14, 55, 101, 7, 3, 90]
EXPERTS = ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]
STYLES = {
    "mixtral": ("block_sparse_moe.experts.{}.{}", ("w1", "w3", "w2")),
    "qwen3_moe": ("mlp.experts.{}.{}", ("gate_proj", "up_proj", "down_proj")),
}


def one_by_one(adapter: Path, folder: Path, style: str, kept: Callable[[int], bool] = lambda expert: True) -> Path:
    """Rewrite an adapter of fused experts as older versions of peft and transformers stored it. kept: whether an
    expert's tensors are written."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    module, (gate, up, down) = STYLES[style]
    given, rank, found = load_file(adapter / "adapter_model.safetensors"), config["r"], {}
    for key, a in given.items():
        if not key.endswith("lora_A.weight"):
            continue
        b = given[key.replace("lora_A", "lora_B")]
        layer = re.search(r"layers\.(\d+)\.", key)
        assert layer
        count = a.shape[0] // rank
        first = a.reshape(count, rank, a.shape[1])
        second = b.reshape(b.shape[0], rank, count).transpose(2, 0, 1)
        for expert in filter(kept, range(count)):
            halves = {gate: 0, up: 1} if ".base_layer." in key else {down: None}
            for name, half in halves.items():
                rows = second[expert] if half is None else np.split(second[expert], 2)[half]
                prefix = f"base_model.model.model.layers.{layer[1]}.{module.format(expert, name)}"
                found[f"{prefix}.lora_A.weight"] = first[expert].copy()
                found[f"{prefix}.lora_B.weight"] = rows.copy()
    folder.mkdir()
    save_file(found, folder / "adapter_model.safetensors")
    plain = {**config, "target_parameters": None, "target_modules": [gate, up, down]}
    (folder / "adapter_config.json").write_text(json.dumps(plain))
    return folder


def difference(expected: object, found: object) -> float:
    wanted = np.asarray(expected)
    return float(np.abs(np.asarray(found) - wanted).max() / np.abs(wanted).max())


@pytest.mark.parametrize("style", usual(STYLES, "qwen3_moe"))
def test_merged_and_at_run_time(
    style: str, model: Callable[[str], Path], engine: Callable[..., Path], tmp_path: Path
) -> None:
    path = save_adapter(model(style), tmp_path / "adapter", target_modules=[], target_parameters=EXPERTS, r=4)
    alone = one_by_one(path, tmp_path / "alone", style)
    graph = load_graph(model(style))
    merge_adapter(graph, read_adapter(alone))
    expected = adapted_logits(model(style), path, IDS)
    assert difference(expected, interpret(graph, IDS)) < 2e-5
    with icc.load(engine(style, adapters="2x16:experts.*")) as llm:
        base = llm.logits(IDS)
        llm.load_adapter("alone", alone)
        assert difference(expected, llm.logits(IDS, adapter="alone")) < 2e-5 < difference(expected, base)


def test_some_experts(model: Callable[[str], Path], tmp_path: Path) -> None:
    """The other experts do not change: as if their B were zeros."""
    path = save_adapter(model("qwen3_moe"), tmp_path / "adapter", target_modules=[], target_parameters=EXPERTS, r=4)
    some = one_by_one(path, tmp_path / "some", "qwen3_moe", lambda expert: expert % 2 == 1)
    tensors = load_file(path / "adapter_model.safetensors")
    for name, value in tensors.items():
        if "lora_B" in name:
            experts = value.reshape(value.shape[0], 4, -1)
            experts[..., ::2] = 0
    save_file(tensors, path / "adapter_model.safetensors")
    graph = load_graph(model("qwen3_moe"))
    merge_adapter(graph, read_adapter(some))
    assert difference(adapted_logits(model("qwen3_moe"), path, IDS), interpret(graph, IDS)) < 2e-5


def test_what_does_not_fit(model: Callable[[str], Path], engine: Callable[..., Path], tmp_path: Path) -> None:
    path = save_adapter(model("mixtral"), tmp_path / "adapter", target_modules=[], target_parameters=EXPERTS, r=12)
    alone = one_by_one(path, tmp_path / "alone", "mixtral")
    with icc.load(engine("mixtral", adapters="2x16:experts.*")) as llm:
        with pytest.raises(RequestError, match="its rank is 24, the engine has room for 16"):
            llm.load_adapter("alone", alone)  # the ranks of gate and up add up
    tensors = load_file(alone / "adapter_model.safetensors")
    wrong = {name.replace("experts.0.", "experts.99."): value for name, value in tensors.items()}
    save_file(wrong, alone / "adapter_model.safetensors")
    with pytest.raises(AdapterError, match=r"the model has no weight .*experts\.99\."):
        merge_adapter(load_graph(model("mixtral")), read_adapter(alone))


def test_experts_that_are_no_plain_products_stay_as_they_are() -> None:
    """Changes with magnitudes (DoRA), or of a rank that would take all memory for the other experts, are not combined
    and are later refused by name."""
    name, shapes = "model.layers.0.mlp.experts.0.down_proj.weight", {"model.layers.0.mlp.experts.down_proj": (4, 6, 8)}
    for rank, magnitude, is_kept in ((2, None, False), (2, np.ones(6, np.float32), True), (9, None, True)):
        low = LowRank(np.ones((rank, 8), np.float32), np.ones((6, rank), np.float32), 1.0)
        adapter = Adapter(Path("a"), b"", "", (), {name: Change(low_rank=low, magnitude=magnitude)})
        assert (name in with_experts_together(adapter, shapes).changes) is is_kept


FOUND: dict[str, tuple[Any, list[str]]] = {
    "named": (["q_proj", "v_proj", "gate_proj", "up_proj", "down_proj"], ["down_proj", "gate_up_proj"]),
    "all": ("all-linear", ["down_proj", "gate.weight", "gate_up_proj"]),
}


@pytest.mark.parametrize("asked", FOUND)
def test_experts_that_peft_has_found_itself(
    asked: str, model: Callable[[str], Path], engine: Callable[..., Path], tmp_path: Path
) -> None:
    """If gate_proj, up_proj and down_proj or all layers are asked for, peft targets the parameters that hold them,
    instead of modules; for all layers also the router's."""
    targets, found = FOUND[asked]
    path = save_adapter(model("qwen3_moe"), tmp_path / "adapter", target_modules=targets, r=4)
    config = json.loads((path / "adapter_config.json").read_text())
    assert sorted(config["target_parameters"]) == found and config["rank_pattern"]
    expected = adapted_logits(model("qwen3_moe"), path, IDS)
    graph = load_graph(model("qwen3_moe"))
    merge_adapter(graph, read_adapter(path))
    assert difference(expected, interpret(graph, IDS)) < 2e-5
    with icc.load(engine("qwen3_moe", adapters="2x16:q_proj,v_proj,experts.*")) as llm:
        if asked == "all":  # routers have no products to which each row could apply another adapter
            with pytest.raises(RequestError, match="no room for adapters there"):
                llm.load_adapter("a", path)
            return
        llm.load_adapter("a", path)
        assert difference(expected, llm.logits(IDS, adapter="a")) < 2e-5

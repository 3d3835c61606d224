"""Checkpoints of BitNet: values are those of transformers' own code, and a refusal names what does not fit."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from icc.compiler.errors import TensorError, UnsupportedModel
from icc.compiler.frontend.load import load_graph
from icc.compiler.frontend.source.packed import unpacked
from icc.compiler.frontend.source.packing import packing_of
from icc.compiler.graph.interpret import interpret
from icc.compiler.weights.handles import Constant, Weight
from safetensors.torch import load_file, save_file
from test_packed import IDS, with_values
from transformers.integrations.bitnet import pack_weights, unpack_weights


def read(tensors: dict[str, torch.Tensor], **stated: Any) -> dict[str, Weight]:
    packing = packing_of({"quantization_config": {"quant_method": "bitnet", **stated}}, Path("model"))
    assert packing is not None
    return unpacked({name: Constant(value) for name, value in tensors.items()}, packing)


def matrix(n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A random matrix packed by transformers, and its values."""
    values = torch.randint(-1, 2, (n, k), generator=torch.Generator().manual_seed(n))
    return pack_weights(values.clone()), values.float()


@pytest.mark.parametrize(("linear", "divides"), [("bitlinear", True), ("autobitlinear", False)])
def test_values_of_a_layer(linear: str, divides: bool) -> None:
    codes, values = matrix(24, 96)
    assert torch.equal(
        getattr(unpack_weights, "_torchdynamo_orig_callable", unpack_weights)(codes, torch.float32), values
    )
    scale = torch.tensor([1.375], dtype=torch.bfloat16)
    found = read({"a.weight": codes, "a.weight_scale": scale, "b.weight": values}, linear_class=linear)
    assert found.keys() == {"a.weight", "b.weight"} and found["a.weight"].describe() == "t2_f32g32[24, 96]"
    assert torch.equal(found["a.weight"].load(), values * (1 / scale.float() if divides else scale.float()))


def test_a_model(tiny: ModuleType, tmp_path: Path) -> None:
    model = tiny.save_tiny(tiny.tiny_configs()["llama"], tmp_path, dtype="bfloat16")
    tensors = load_file(tmp_path / "model.safetensors")
    kept = dict(tensors)
    for name in (name for name in kept if "proj" in name):
        codes, values = matrix(*kept[name].shape)
        kept[name] = values * 0.0625
        tensors |= {name: codes, f"{name}_scale": torch.tensor([16.0], dtype=torch.bfloat16)}
    config = json.loads((tmp_path / "config.json").read_text())
    expected = with_values(model, tmp_path, kept)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "bitnet"}}))
    graph = load_graph(tmp_path, 64)
    assert sum(weight.storage.name.startswith("t2_f32g") for weight in graph.weights.values()) == 14
    assert float((interpret(graph, IDS) - expected).abs().max() / expected.abs().max()) < 2e-5


def test_what_does_not_fit_is_named() -> None:
    codes, _ = matrix(24, 96)
    one = torch.ones(1)
    for weight, scale, words in (
        (codes[:, :20], one, r"a.weight.*uint8 \[6, 20\].*multiple of 16"), (codes.float(), one, "a.weight.*float32"),
        (codes, torch.ones(24), r"scales \[24\]"), (codes | 3, one, "none of -1, 0 and"), (codes, 0 * one, "no valid"),
    ):  # fmt: skip
        with pytest.raises(TensorError, match=words):
            read({"a.weight": weight, "a.weight_scale": scale})["a.weight"].load()
    for stated, words in (({"quantization_mode": "online"}, "bitnet online"), ({"use_rms_norm": True}, "bitnet")):
        with pytest.raises(UnsupportedModel, match=rf"already quantized \({words}\)"):
            read({}, linear_class="autobitlinear", **stated)

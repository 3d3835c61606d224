"""Checkpoints whose quantizer restructured the model: split experts, and GPT-2's transposed matrices."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from icc.compiler.errors import CheckpointError
from icc.compiler.frontend.load import load_graph
from icc.compiler.frontend.source.source import open_source
from icc.compiler.graph.interpret import interpret
from icc.compiler.weights.handles import QuantizedWeight, SortedColumns, Transposed, Weight
from safetensors.torch import load_file, save_file
from test_packed import CONFIGS, IDS, layer


def stated(folder: Path, kind: str, tensors: dict[str, torch.Tensor]) -> None:
    save_file(
        {name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": CONFIGS[kind]}))


def apart(model: Any) -> dict[str, torch.Tensor]:
    """The model's tensors with a linear layer for each product of each expert, as in llm-compressor's LinearExperts."""
    found = dict(model.state_dict())
    for path, module in model.named_modules():
        if not isinstance(getattr(module, "gate_up_proj", None), torch.nn.Parameter):
            continue
        own = {
            kind: found.pop(f"{path}.{kind}", None)
            for kind in ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias")
        }
        gate_up, down = own["gate_up_proj"], own["down_proj"]
        assert gate_up is not None and down is not None
        if gate_up.shape[1:] == (down.shape[2], 2 * down.shape[1]):
            gate_up, down = gate_up.mT, down.mT
        biases = own["gate_up_proj_bias"], own["down_proj_bias"]
        for number in range(len(gate_up)):
            parts = {"down": (down, biases[1], slice(None))}
            half = gate_up.shape[1] // 2
            between = not getattr(module, "is_concatenated", True)
            for part, first in (("gate", 0), ("up", 1)):
                rows = slice(first, None, 2) if between else slice(first * half, (first + 1) * half)
                parts[part] = gate_up, biases[0], rows
            for part, (whole, bias, rows) in parts.items():
                found[f"{path}.{number}.{part}_proj.weight"] = whole[number][rows].clone()
                if bias is not None:
                    found[f"{path}.{number}.{part}_proj.bias"] = bias[number][rows].clone()
    return found


def weights(folder: Path) -> dict[str, Weight]:
    source = open_source(folder)
    return source.weights(source.build(False, "generate"))


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "llama4-chunks_and_scaled_inputs"])
def test_experts_taken_apart(family: str, tiny: ModuleType, tmp_path: Path) -> None:
    """Gate and up as two halves; interleaved, transposed and with biases; only transposed."""
    model = tiny.save_tiny(tiny.tiny_configs()[family], tmp_path, dtype="float16")
    tensors = apart(model)
    stated(tmp_path, "compressed", tensors)
    plain = weights(tmp_path)
    assert all(torch.equal(plain[name].load(), value) for name, value in model.state_dict().items())
    values, packed = dict(tensors), dict(tensors)
    for number, name in enumerate(sorted(n for n in tensors if n.endswith("_proj.weight") and ".experts." in n)):
        own, values[name] = layer("compressed", *tensors[name].shape, 4, 16, number)
        del packed[name]
        packed |= {f"{name.removesuffix('.weight')}.{part}": value for part, value in own.items()}
    stated(tmp_path, "compressed", values)
    wanted = {name: weight.load().clone() for name, weight in weights(tmp_path).items()}
    stated(tmp_path, "compressed", packed)
    found = weights(tmp_path)
    assert all(torch.equal(found[name].load(), value) for name, value in wanted.items())
    stored = [
        w.source if isinstance(w, Transposed) else w
        for name, w in found.items()
        if name.endswith("_proj") and "experts" in name
    ]
    assert stored and all(isinstance(weight, QuantizedWeight) for weight in stored)
    lost = next(n for n in packed if ".1.down_proj.weight_packed" in n).removesuffix("weight_packed")
    stated(tmp_path, "compressed", {name: value for name, value in packed.items() if not name.startswith(lost)})
    with pytest.raises(CheckpointError, match="cannot convert the tensors of"):
        weights(tmp_path)


@pytest.mark.parametrize("act", [False, True])
def test_layers_of_gpt2(act: bool, tiny: ModuleType, tmp_path: Path) -> None:
    """Quantizers store its [K, N] matrices as [N, K]; matrices that they do not quantize are not transposed."""
    model = tiny.save_tiny(tiny.tiny_configs()["gpt2"], tmp_path, dtype="float16").float()
    tensors = load_file(tmp_path / "model.safetensors")
    for number, name in enumerate(sorted(n for n in tensors if n.endswith(("c_attn.weight", "attn.c_proj.weight")))):
        k, n = tensors.pop(name).shape
        own, values = layer("gptq", n, k, 4, 16, number, act=(number + 1) * act)
        tensors |= {f"{name.removesuffix('.weight')}.{part}": value for part, value in own.items()}
        model.get_parameter(name if name.startswith("transformer.") else f"transformer.{name}").data.copy_(values.T)
    stated(tmp_path, "gptq", tensors)
    graph = load_graph(tmp_path, 64)
    stored = [w for w in graph.weights.values() if isinstance(w, SortedColumns if act else QuantizedWeight)]
    assert len(stored) >= 4
    expected = tiny.reference_logits(model, IDS)
    assert float((interpret(graph, IDS) - expected).abs().max() / expected.abs().max()) < 2e-5

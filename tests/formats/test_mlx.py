"""Checkpoints of MLX: the values that MLX itself decodes, whole models, and refusals."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from icc.compiler.errors import TensorError, UnsupportedModel
from icc.compiler.frontend.load import load_graph
from icc.compiler.frontend.source.checkpoint import open_checkpoint
from icc.compiler.frontend.source.packed import unpacked
from icc.compiler.frontend.source.packing import packing_of
from icc.compiler.graph.interpret import interpret
from icc.compiler.weights.handles import Constant, Weight
from run_lowered import optimize
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from sizes import soak
from test_packed import IDS, packed, with_values

FILE = Path(__file__).with_name("data") / "mlx.safetensors"  # benchmarks/record_mlx.py
DOWN = [f"model.layers.{i}.mlp.down_proj" for i in range(2)]


def read(tensors: dict[str, Weight], stated: dict[str, Any]) -> dict[str, Weight]:
    packing = packing_of({"quantization": stated, "quantization_config": stated}, Path("model"))
    assert packing is not None
    return unpacked(tensors, packing)


def test_values_are_those_that_mlx_makes(tmp_path: Path) -> None:
    """Codes of 2 to 8 bits, scales of both signs and types, experts in a stack, and 4-bit floats."""
    (tmp_path / "model.safetensors").write_bytes(FILE.read_bytes())
    with safe_open(FILE, "pt") as file:
        about: dict[str, str] = file.metadata()
    layers = json.loads(about["quantization"])
    found = read(dict(open_checkpoint(tmp_path)), {"bits": 4, "group_size": 64, **layers})
    for layer, expected in json.loads(about["sha256"]).items():
        stack = layer.removesuffix(".switch_mlp.up_proj")
        names = [name for name in found if name.startswith((f"{stack}.experts.", f"{layer}.weight"))]
        values = torch.stack([found.pop(name).load().to(torch.float32) for name in names])
        assert hashlib.sha256(values.contiguous().numpy().tobytes()).hexdigest() == expected, layers[layer]
    assert not found


def affine(values: torch.Tensor, bits: int, group: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The tensors of a layer [.., N, K] in bfloat16, and their values."""
    groups = values.unflatten(-1, (-1, group)).float()
    low, high = groups.amin(-1), groups.amax(-1)
    scales, biases = ((high - low) / (2**bits - 1)).bfloat16(), low.bfloat16()
    wide = scales.float().unsqueeze(-1), biases.float().unsqueeze(-1)
    codes = ((groups - wide[1]) / wide[0]).round().clamp(0, 2**bits - 1)
    words = packed(codes.flatten(-2), bits, -1).view(torch.uint32)
    return {"weight": words, "scales": scales, "biases": biases}, (codes * wide[0] + wide[1]).flatten(-2)


def quantized(folder: Path, stated: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Quantize a checkpoint as mlx_lm does, with stacked experts; returns the values of its tensors by their old
    names."""
    tensors = load_file(folder / "model.safetensors")
    kept, stored, experts = dict(tensors), dict[str, torch.Tensor](), dict[str, dict[int, str]]()
    for name, value in tensors.items():
        head, found, rest = name.partition(".experts.")
        number, _, part = rest.partition(".")
        if found and number.isdigit():
            part = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}.get(part.removesuffix(".weight"), part)
            experts.setdefault(f"{head}.switch_mlp.{part.removesuffix('.weight')}", {})[int(number)] = name
        elif value.dim() < 2 or "gate.weight" in name:
            stored[name] = value
        else:
            layer = name.removesuffix(".weight")
            own = {**stated, **stated.get(layer, {})}
            parts, kept[name] = affine(value, own["bits"], own["group_size"])
            stored |= {f"{layer}.{part}": tensor for part, tensor in parts.items()}
    for stack, names in experts.items():
        values = torch.stack([tensors[names[i]] for i in range(len(names))])
        parts, found = affine(values, stated["bits"], 16)
        stored |= {f"{stack}.{part}": tensor for part, tensor in parts.items()}
        kept |= {names[i]: found[i] for i in names}
        stated[stack] = {"bits": stated["bits"], "group_size": 16}
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization": stated}))
    save_file(stored, folder / "quantized.safetensors", {"format": "mlx"})
    return kept


@pytest.mark.parametrize(
    ("family", "stated"),
    [
        ("llama", {"bits": 4, "group_size": 32, "model.layers.0.mlp.down_proj": {"bits": 6, "group_size": 32}}),
        ("mixtral", {"bits": 3, "group_size": 32}),
        *soak(
            ("qwen2-tied_yarn", {"bits": 8, "group_size": 64, **{name: {"group_size": 32} for name in DOWN}}),
            ("qwen3_moe", {"bits": 4, "group_size": 16}),
        ),
    ],
)
def test_models(family: str, stated: dict[str, Any], tiny: ModuleType, tmp_path: Path) -> None:
    """Embeddings and heads are quantized too."""
    model = tiny.save_tiny(tiny.tiny_configs()[family], tmp_path, dtype="bfloat16")
    expected = with_values(model, tmp_path, quantized(tmp_path, stated))
    (tmp_path / "quantized.safetensors").replace(tmp_path / "model.safetensors")
    graph = load_graph(tmp_path, 64)
    assert any(w.storage.name.startswith(f"oq{stated['bits']}_bf16g") for w in graph.weights.values())
    assert float((interpret(graph, IDS) - expected).abs().max() / expected.abs().max()) < 2e-5


def test_experts_of_which_gate_and_up_take_turns(tiny: ModuleType, tmp_path: Path) -> None:
    """gpt-oss: one tensor for all experts, [E, K, N] with biases, which MLX splits into two stacks [E, N, K]."""
    model = tiny.save_tiny(tiny.tiny_configs()["gpt_oss"], tmp_path, dtype="bfloat16")
    kept = load_file(tmp_path / "model.safetensors")
    stored = {name: value for name, value in kept.items() if ".experts." not in name}
    for name in (name for name in [*kept] if name.endswith("experts.gate_up_proj")):
        layer = name.removesuffix(".gate_up_proj")
        both = [affine(kept[name].mT[:, i::2].contiguous(), 4, 32) for i in (0, 1)]
        down, values = affine(kept[f"{layer}.down_proj"].mT.contiguous(), 4, 32)
        kept[name] = torch.stack([both[0][1], both[1][1]], 2).flatten(1, 2).mT.contiguous()
        kept[f"{layer}.down_proj"] = values.mT.contiguous()
        for part, tensors in (("gate_proj", both[0][0]), ("up_proj", both[1][0]), ("down_proj", down)):
            stored |= {f"{layer}.{part}.{kind}": tensor for kind, tensor in tensors.items()}
        halves = {
            f"{layer}.{part}.bias": kept[f"{name}_bias"][:, i::2] for i, part in enumerate(("gate_proj", "up_proj"))
        }
        stored |= {k: v.contiguous() for k, v in halves.items()} | {
            f"{layer}.down_proj.bias": kept[f"{layer}.down_proj_bias"]
        }
    config = json.loads((tmp_path / "config.json").read_text())
    expected = with_values(model, tmp_path, kept)
    save_file(stored, tmp_path / "model.safetensors", {"format": "mlx"})
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization": {"bits": 4, "group_size": 32}}))
    graph = load_graph(tmp_path, 64)
    optimize(graph)
    experts = [w.describe() for name, w in graph.weights.items() if ".experts." in name and "bias" not in name]
    assert len(experts) == 4 and all(text.startswith("oq4_bf16g32[4, ") for text in experts), experts
    assert float((interpret(graph, IDS) - expected).abs().max() / expected.abs().max()) < 2e-5


@pytest.mark.parametrize(
    ("stated", "named"),
    [({"mode": "mxfp8", "bits": 8, "group_size": 64}, "mlx mxfp8"), ({"bits": 7, "group_size": 64}, "mlx"),
     ({"bits": 4, "group_size": 64, "lm_head": {"mode": "nvfp4", "group_size": 32}}, "mlx"),
     ({"bits": "4", "group_size": 64}, "mlx"), ({"bits": 4}, "mlx")],
)  # fmt: skip
def test_other_kinds_are_refused_by_name(stated: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=rf"already quantized \({named}\)"):
        packing_of({"quantization": stated}, Path("model"))


def test_tensors_that_do_not_fit_are_named() -> None:
    parts, _ = affine(torch.randn(8, 128), 4, 64)
    stated = {"bits": 4, "group_size": 64}

    def asked(**changed: torch.Tensor | None) -> dict[str, Weight]:
        mine = {**parts, **changed}
        return read({f"a.{part}": Constant(value) for part, value in mine.items() if value is not None}, stated)

    with pytest.raises(TensorError, match=r"a.weight.*uint32 \[8, 8\].*does not fit 4 bits in groups of 64"):
        asked(weight=parts["weight"][:, :8])
    with pytest.raises(
        TensorError, match=r"does not fit 4 bits in groups of 32 \(mxfp4\)"
    ):  # mxfp4 scales are exponents
        halves = {"a.weight": Constant(parts["weight"]), "a.scales": Constant(torch.ones(8, 4).bfloat16())}
        read(halves, {"bits": 4, "group_size": 32, "mode": "mxfp4"})
    with pytest.raises(TensorError, match=r"a.biases.*has not the shape \[8, 2\]"):
        asked(biases=None)
    with pytest.raises(TensorError, match=r"a.biases.*no half float"):
        asked(biases=torch.full((8, 2), 1e6, dtype=torch.bfloat16))["a.weight"].load()
    with pytest.raises(UnsupportedModel, match="scales of float32"):
        asked(scales=parts["scales"].float(), biases=parts["biases"].float())

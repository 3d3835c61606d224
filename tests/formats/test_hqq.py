"""Checkpoints of HQQ: the values of files that hqq itself saved, a model, and refusals."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
from icc.compiler.errors import TensorError, UnsupportedModel
from icc.compiler.frontend.load import load_graph
from icc.compiler.frontend.source.packed import unpacked
from icc.compiler.frontend.source.packing import packing_of
from icc.compiler.graph.interpret import interpret
from icc.compiler.weights.handles import Constant, Weight
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_packed import IDS, with_values

FILE = Path(__file__).with_name("data") / "hqq.safetensors"  # benchmarks/record_hqq.py
CONFIG = {"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 4, "group_size": 64, "axis": 1}}}


def read(tensors: dict[str, torch.Tensor]) -> dict[str, Weight]:
    packing = packing_of({"quantization_config": CONFIG}, Path("model"))
    assert packing is not None
    return unpacked({name: Constant(value) for name, value in tensors.items()}, packing)


def test_values_are_those_of_hqq() -> None:
    with safe_open(FILE, "pt") as file:
        expected = json.loads(file.metadata()["sha256"])
    found = read(load_file(FILE))
    assert found.keys() == {f"{layer}.weight" for layer in expected} and len(found) == 5
    for layer, digest in expected.items():
        assert hashlib.sha256(found[f"{layer}.weight"].load().numpy().tobytes()).hexdigest() == digest, layer


def layer(n: int, k: int, group: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The tensors of a 4-bit matrix as hqq saves them, and its values."""
    codes = torch.randint(0, 16, (n * k // group, group), dtype=torch.uint8)
    scale, zero = torch.rand(len(codes), 1).bfloat16() * 0.02, torch.randint(0, 16, (len(codes), 1)).bfloat16()
    half = len(codes) // 2
    numbers = {"nbits": 4, "group_size": group, "axis": 1, "view_as_float": 0, "quant_scale": 0}
    own = {name: torch.tensor(value, dtype=torch.int32) for name, value in numbers.items()}
    own |= {"W_q": codes[:half] << 4 | codes[half:], "scale": scale, "zero": zero, "shape": torch.tensor([n, k])}
    taken = (scale.float() * zero.float()).half().float()
    return own, (codes.float() * scale.float() - taken).reshape(n, k)


def test_a_model(tiny: ModuleType, tmp_path: Path) -> None:
    model = tiny.save_tiny(tiny.tiny_configs()["llama"], tmp_path, dtype="bfloat16")
    tensors = load_file(tmp_path / "model.safetensors")
    kept = dict(tensors)
    for name in (name for name in kept if "proj" in name):
        own, kept[name] = layer(*tensors.pop(name).shape, 32)
        tensors |= {f"{name.removesuffix('.weight')}.{part}": value for part, value in own.items()}
    config = json.loads((tmp_path / "config.json").read_text())
    expected = with_values(model, tmp_path, kept)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": CONFIG}))
    graph = load_graph(tmp_path, 64)
    assert sum(weight.storage.name == "oq4_bf16g32" for weight in graph.weights.values()) == 14
    assert float((interpret(graph, IDS) - expected).abs().max() / expected.abs().max()) < 2e-5


@pytest.mark.parametrize(
    ("part", "value", "kind", "words"),
    [
        ("axis", torch.tensor(0), UnsupportedModel, "along axis 0"),
        ("nbits", torch.tensor(5), UnsupportedModel, "of 5 bits"),
        ("nbits", torch.ones(3), TensorError, "not one number"),
        ("quant_scale", torch.tensor(1), UnsupportedModel, "scales that are quantized"),
        ("scale", torch.ones(16, 1), UnsupportedModel, "HQQ of 4 bits"),
        ("zero", None, TensorError, "a.zero.*missing"),
        ("group_size", torch.tensor(128), TensorError, r"no matrix \[8, 128\]"),
        ("shape", torch.tensor([8]), TensorError, r"no matrix \[8\]"),
    ],
)
def test_what_does_not_fit_is_named(part: str, value: torch.Tensor | None, kind: type[Exception], words: str) -> None:
    own, _ = layer(8, 128, 64)
    mine = {**own, part: value}
    with pytest.raises(kind, match=words):
        read({f"a.{name}": value for name, value in mine.items() if value is not None})

"""Checkpoints of 8-bit floats, written by the formats' own libraries if available, give the values that those libraries
read."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from icc.compiler.errors import CheckpointError, TensorError, UnsupportedModel
from icc.compiler.frontend.load import load_graph
from icc.compiler.frontend.source.float8 import Float8Layer
from icc.compiler.frontend.source.model import build_meta_model
from icc.compiler.frontend.source.packing import packing_of
from icc.compiler.frontend.source.packings import Float8Packing
from icc.compiler.frontend.source.source import open_source
from icc.compiler.graph.interpret import interpret
from icc.compiler.weights.handles import Constant, QuantizedWeight
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

IDS = np.random.default_rng(0).integers(3, 119, 13).tolist()
Stored = dict[str, Tensor]


def of_transformers(weight: Tensor, block: tuple[int, int] | None, scale_fmt: str = "float") -> tuple[Stored, Tensor]:
    """The tensors that transformers writes for a weight, and the values that it reads from them."""
    config = SimpleNamespace(weight_block_size=block, scale_fmt=scale_fmt)
    own = SimpleNamespace(quantization_config=config)
    found = Fp8Quantize(own)._quantize_one("weight", weight)
    if "weight_scale_inv" not in found:
        found["weight_scale_inv"] = found.pop("weight_scale")
    return found, Fp8Dequantize(own)._dequantize_one(found["weight"], found["weight_scale_inv"], torch.float32)


def of_compressed_tensors(weight: Tensor, strategy: str, block: list[int] | None = None) -> tuple[Stored, Tensor]:
    """As `of_transformers`, by compressed-tensors."""
    ct = pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.naive_quantized.base import FloatQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    assert ct
    args = QuantizationArgs(num_bits=8, type="float", strategy=strategy, symmetric=True, block_structure=block)
    scheme = QuantizationScheme(
        targets=["Linear"], weights=args, input_activations=args if strategy == "tensor" else None
    )
    if strategy == "block":
        rows, columns = block or [0, 0]
        tiles = weight.unflatten(0, (-1, rows)).unflatten(2, (-1, columns))
        low, high = tiles.amin((1, 3)), tiles.amax((1, 3))
    else:
        low, high = (f(weight.float(), dim=1, keepdim=True) for f in (torch.amin, torch.amax))
        if strategy == "tensor":
            low, high = low.min().reshape(1), high.max().reshape(1)
    scale, _ = calculate_qparams(low, high, args)
    state = {"weight": weight, "weight_scale": scale.to(torch.float32)}
    stored = FloatQuantizationCompressor.compress(state, scheme)
    return stored, FloatQuantizationCompressor.decompress(stored, scheme)["weight"]


def of_modelopt(weight: Tensor, shape: tuple[int, ...]) -> tuple[Stored, Tensor]:
    """The tensors that ModelOpt exports, and their values: one scale, one per channel, or blocks of 32 x 32 as [rows,
    1, columns, 1]."""
    n, k = weight.shape
    rows, columns = (n, k) if not shape else (1, k) if shape == (n,) else (32, 32)
    tiles = weight.float().unflatten(0, (-1, rows)).unflatten(2, (-1, columns))
    scale = tiles.abs().amax((1, 3), keepdim=True) / 448
    codes = (tiles / scale).to(torch.float8_e4m3fn)
    values = (codes.float() * scale).reshape(n, k)
    stored = {"weight": codes.reshape(n, k), "weight_scale": scale.reshape(shape), "input_scale": torch.ones(())}
    return stored, values


COMPRESSED = {"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"]}
GROUP = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float"}}
ROUNDED = GROUP | {"input_activations": {"num_bits": 8, "type": "float", "dynamic": True}}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head*"]}
CASES: dict[str, tuple[Any, dict[str, Any], str]] = {
    "hf-block": (
        lambda w: of_transformers(w, (32, 32)), {"quant_method": "fp8", "weight_block_size": [32, 32]}, "e4m3_kg32",
    ),
    "hf-ue8m0": (lambda w: of_transformers(w, (16, 32), "ue8m0"), {"quant_method": "fp8"}, "e4m3_kg32"),
    "hf-tensor": (lambda w: of_transformers(w, None), {"quant_method": "fp8", "activation_scheme": "static"}, "e4m3"),
    "fbgemm": (
        lambda w: of_compressed_tensors(w, "channel"),
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}, "e4m3",
    ),
    "ct-tensor": (lambda w: of_compressed_tensors(w, "tensor"), COMPRESSED | {"config_groups": {"a": ROUNDED}}, "e4m3"),
    "ct-block": (
        lambda w: of_compressed_tensors(w, "block", [16, 16]), COMPRESSED | {"config_groups": {"a": GROUP}},
        "e4m3w_kg16",
    ),
    "modelopt": (lambda w: of_modelopt(w, ()), MODELOPT, "e4m3"),
    "modelopt-channel": (
        lambda w: of_modelopt(w, (len(w),)), MODELOPT | {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, "e4m3"
    ),
    "modelopt-block": (
        lambda w: of_modelopt(w, (len(w) // 32, 1, w.shape[1] // 32, 1)),
        {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8_PB_WO", "exclude_modules": ["lm_head"]}},
        "e4m3w_kg32",
    ),
}  # fmt: skip


def write(folder: Path, config: dict[str, Any]) -> None:
    """Write a quantization's configuration to the file that its library uses."""
    if "producer" in config:
        (folder / "hf_quant_config.json").write_text(json.dumps(config))
    else:
        facts = json.loads((folder / "config.json").read_text()) | {"quantization_config": config}
        (folder / "config.json").write_text(json.dumps(facts))


def checkpoint(kind: str, tiny: ModuleType, folder: Path, family: str = "llama") -> tuple[Any, dict[str, Tensor]]:
    """Write a checkpoint to `folder`; returns the model, and the values of its quantized matrices."""
    make, config, _ = CASES[kind]
    model = tiny.save_tiny(tiny.tiny_configs()[family], folder, dtype="bfloat16").to(torch.float32)
    tensors, values = load_file(folder / "model.safetensors"), {}
    for name in sorted(n for n in tensors if "proj" in n):
        stored, values[name] = make(tensors.pop(name).float())
        tensors |= {f"{name.removesuffix('.weight')}.{part}": value for part, value in stored.items()}
        if "experts." not in name:
            model.get_parameter(name).data.copy_(values[name])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    write(folder, config)
    return model, values


@pytest.mark.parametrize("kind", CASES)
def test_values_are_those_of_the_library(kind: str, tiny: ModuleType, tmp_path: Path) -> None:
    _, values = checkpoint(kind, tiny, tmp_path)
    source = open_source(tmp_path)
    weights = source.weights(build_meta_model(source.config))
    found = {name: weight for name, weight in weights.items() if isinstance(weight, QuantizedWeight)}
    assert set(found) == set(values)
    for name, weight in found.items():
        assert weight.describe().startswith(f"{CASES[kind][2]}[")
        assert torch.equal(weight.load(), values[name].to(torch.float32)), name


def test_models(tiny: ModuleType, tmp_path: Path) -> None:
    model, _ = checkpoint("hf-block", tiny, tmp_path)
    graph = load_graph(tmp_path, 64)
    assert sum(weight.describe().startswith("e4m3_kg32") for weight in graph.weights.values()) == 14
    expected = tiny.reference_logits(model, IDS)
    assert float((interpret(graph, IDS) - expected).abs().max() / expected.abs().max()) < 2e-5


@pytest.mark.parametrize("kind", ["hf-tensor", "ct-block"])
def test_experts_are_merged_as_they_are(kind: str, tiny: ModuleType, tmp_path: Path) -> None:
    """The file has a matrix with its scales per expert; the model has one weight for all experts of a layer."""
    _, values = checkpoint(kind, tiny, tmp_path, "qwen3_moe")
    source = open_source(tmp_path)
    weights = source.weights(build_meta_model(source.config))
    for number in range(2):
        name = f"model.layers.{number}.mlp.experts"
        gate, up, down = (
            torch.stack([values[f"{name}.{e}.{part}_proj.weight"] for e in range(4)]) for part in ("gate", "up", "down")
        )
        for part, expected in (("gate_up", torch.cat((gate, up), 1)), ("down", down)):
            found = weights[f"{name}.{part}_proj"]
            assert isinstance(found, QuantizedWeight) and found.given and found.format.name == CASES[kind][2]
            assert torch.equal(found.load(), expected.float())


def layer(codes: Tensor, scales: Tensor, block: tuple[int, int] | None = None) -> Float8Layer:
    return Float8Layer("a.weight", Constant(codes), Constant(scales), block)


def test_blocks_that_do_not_fill_the_matrix() -> None:
    """DeepSeek-V3 has matrices of 576 rows in blocks of 128."""
    weight, block = torch.randn(72, 100), (32, 48)
    codes = weight.to(torch.float8_e4m3fn)
    scales = torch.rand(3, 3) + 0.5
    found = layer(codes, scales, block)
    assert found.format.name == "e4m3_kg48"
    spread = scales.repeat_interleave(32, 0)[:72].repeat_interleave(48, 1)[:, :100]
    assert torch.equal(found.load(), codes.float() * spread)
    experts = layer(codes.expand(2, 72, 100).contiguous(), torch.stack([scales, 2 * scales]), block)
    assert torch.equal(experts.load(), codes.float() * torch.stack([spread, 2 * spread]))


@pytest.mark.parametrize(
    ("scales", "words"),
    [
        (torch.ones(5, 1), r"have shape \[5, 1\] for \[72, 100\]"),
        (torch.ones(2, 2, 2), r"have shape \[2, 2, 2\]"),
        (torch.ones(0, 1), r"have shape \[0, 1\]"),
        (torch.full((72, 1), torch.nan), "hold NaN or Inf"),
    ],
)
def test_scales_that_fit_nothing_are_refused(scales: Tensor, words: str) -> None:
    with pytest.raises(TensorError, match=words):
        layer(torch.zeros(72, 100).to(torch.float8_e4m3fn), scales).load()


def test_not_a_number_is_refused() -> None:
    codes = torch.zeros(4, 16, dtype=torch.uint8)
    codes[2, 3] = 0xFF
    with pytest.raises(TensorError, match=r"'a\.weight': holds NaN"):
        layer(codes.view(torch.float8_e4m3fn), torch.ones(())).load()


def test_what_is_not_read_is_refused_by_name(tiny: ModuleType, tmp_path: Path) -> None:
    tiny.save_tiny(tiny.tiny_configs()["llama"], tmp_path, dtype="bfloat16")
    plain = (tmp_path / "config.json").read_text()
    for facts, words in (
        ({"quant_method": "fp8", "fmt": "e5m2"}, "(fp8 e5m2)"),
        ({"quant_method": "fp8", "expert_dtype": "fp4"}, "already quantized (fp8)"),
        (MODELOPT | {"quant_algo": "W4A8_AWQ"}, "(modelopt W4A8_AWQ)"),
        (
            COMPRESSED | {"config_groups": {"a": GROUP}, "sparsity_config": {"format": "sparse-24-bitmask"}},
            "float-quant",
        ),
        (COMPRESSED | {"config_groups": {"a": {"weights": {"num_bits": 4, "type": "float"}}}}, "float-quant"),
    ):
        write(tmp_path, facts)
        with pytest.raises(UnsupportedModel, match=re.escape(words)):
            load_graph(tmp_path)
    (tmp_path / "config.json").write_text(plain)
    (tmp_path / "hf_quant_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="does not say how the model is quantized"):
        load_graph(tmp_path)
    (tmp_path / "hf_quant_config.json").unlink()
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedModel, match=rf"{name}' is stored as float8_e4m3fn"):
        load_graph(tmp_path)
    write(tmp_path, {"quant_method": "fp8"})
    with pytest.raises(TensorError, match=r"up_proj\.weight_scale_inv': is missing"):
        load_graph(tmp_path)


@pytest.mark.parametrize("stated", ["128x128", [128, 128], None, 128, ["a", "b"], [0, 128]])
def test_blocks_as_configurations_state_them(stated: Any) -> None:
    found = packing_of({"quantization_config": {"quant_method": "fp8", "weight_block_size": stated}}, Path("model"))
    block = (128, 128) if stated in ("128x128", [128, 128]) else None
    assert found == Float8Packing(8, block=block)

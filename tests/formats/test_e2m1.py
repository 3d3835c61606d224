"""Checkpoints of 4-bit floats: MXFP4 and NVFP4 of gpt-oss, compressed-tensors and ModelOpt."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from building import build
from icc.compiler.errors import TensorError, UnsupportedModel
from icc.compiler.frontend.load import load_graph
from icc.compiler.frontend.source.e2m1 import with_floats
from icc.compiler.frontend.source.packing import packing_of
from icc.compiler.frontend.source.packings import CompressedPacking, E2m1Packing
from icc.compiler.graph.interpret import interpret
from icc.compiler.weights.handles import Constant, Weight
from icc.runtime.format.manifest import Limits
from run_lowered import lower_graph, optimize, run_lowered
from safetensors.torch import load_file, save_file
from sizes import SOAK
from test_ggml_kernels import few_blocks
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

__all__ = ["few_blocks"]
IDS = np.random.default_rng(0).integers(3, 119, 13).tolist()
E4M3 = torch.float8_e4m3fn


def blocks(*shape: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random bytes [..., N, K / 32, 16] and exponents of a matrix [..., N, K]."""
    rng = torch.Generator().manual_seed(seed)
    *lead, k = shape
    codes = torch.randint(0, 256, (*lead, k // 32, 16), generator=rng, dtype=torch.uint8)
    return codes, torch.randint(118, 123, (*lead, k // 32), generator=rng, dtype=torch.uint8)


def handles(tensors: dict[str, torch.Tensor]) -> dict[str, Weight]:
    return {name: Constant(value) for name, value in tensors.items()}


def test_experts_of_gpt_oss(tiny: ModuleType, tmp_path: Path, few_blocks: None) -> None:
    """Values are those of transformers, in the interpreter and in an engine for the CPU."""
    model = tiny.save_tiny(tiny.tiny_configs()["gpt_oss"], tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    wanted: dict[str, torch.Tensor] = {}
    for seed, name in enumerate(sorted(n for n in tensors if n.endswith("_proj") and ".experts." in n)):
        experts, k, n = tensors.pop(name).shape
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = both = blocks(experts, n, k, seed=seed)
        wanted[name] = convert_moe_packed_tensors(*both).float()
        model.get_parameter(name).data.copy_(wanted[name])
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    facts = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": facts}))
    graph = load_graph(tmp_path, 64)
    assert len(wanted) == 4 and all(torch.equal(graph.weights[name].load(), value) for name, value in wanted.items())
    expected = tiny.reference_logits(model, IDS)
    assert float((interpret(graph, IDS) - expected).abs().max() / expected.abs().max()) < 2e-5
    lowered = lower_graph(optimize(graph))
    assert [w.format for w in lowered.program.weights.values()].count("mxfp4") == 4
    found = run_lowered(lowered, tmp_path / "cpu", IDS)
    assert np.abs(found - expected.numpy()).max() < 0.03 * float(expected.abs().max())  # activations are int8
    if SOAK:
        engine = build(tmp_path, limits=Limits(max_seq_len=20, max_batch_size=2, max_step_tokens=16), block_size=4)
        on_gpu, same = engine.llm().logits(IDS), interpret(engine.graph, IDS).numpy()
        assert np.abs(on_gpu - same).max() < 1e-2 * np.abs(same).max()  # activations are bf16


@pytest.mark.parametrize("kind", ["mxfp4", "nvfp4"])
def test_what_compressed_tensors_writes(kind: str) -> None:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme

    scheme: QuantizationScheme = preset_name_to_scheme({"mxfp4": "MXFP4A16", "nvfp4": "NVFP4A16"}[kind], ["Linear"])
    compressor: Any = BaseCompressor.get_value_from_registry(f"{kind}-pack-quantized")
    weight = torch.randn(24, 192, generator=torch.Generator().manual_seed(0)) * 0.02
    given: dict[str, torch.Tensor] = {"weight": weight}
    peak = weight.unflatten(-1, (-1, 16 if kind == "nvfp4" else 32)).abs().amax(-1)
    if kind == "nvfp4":
        given["weight_global_scale"] = (448 * 6 / weight.abs().max()).reshape(1)
        given["weight_scale"] = (given["weight_global_scale"] * peak / 6).to(E4M3).to(torch.float32)
    else:
        given["weight_scale"] = torch.exp2(torch.floor(torch.log2(peak)) - 2)
    stored = compressor.compress(given, scheme)
    expected = compressor.decompress(stored, scheme)["weight"].to(torch.float32)
    found = with_floats(handles({f"a.{name}": value for name, value in stored.items()}))
    assert set(found) == {"a.weight"}
    assert found["a.weight"].describe() == f"{'mxfp4' if kind == 'mxfp4' else 'nvfp4_xg64'}[24, 192]"
    ours = found["a.weight"].load()
    assert float((ours - weight).norm() / weight.norm()) < 0.2
    tolerance = 0.0 if kind == "mxfp4" else 2**-9  # the library computes in 16 bits
    torch.testing.assert_close(ours, expected, rtol=tolerance, atol=0)


def nvfp4(n: int = 24, k: int = 192) -> dict[str, torch.Tensor]:
    """The tensors of a layer as ModelOpt writes them."""
    rng = torch.Generator().manual_seed(1)
    scales = torch.randint(0, 0x7F, (n, k // 16), generator=rng, dtype=torch.uint8).view(E4M3)
    codes = torch.randint(0, 256, (n, k // 2), generator=rng, dtype=torch.uint8)
    found = {"a.weight": codes, "a.weight_scale": scales, "a.weight_scale_2": torch.tensor(3.1e-4)}
    return found | {"a.input_scale": torch.ones(())}


def test_what_modelopt_writes() -> None:
    """NVFP4QTensor.dequantize: levels times (scale times scale of the tensor), float32."""
    tensors = nvfp4()
    levels = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    codes = torch.stack((tensors["a.weight"] & 15, tensors["a.weight"] >> 4), -1).flatten(-2)
    scales = tensors["a.weight_scale"].float() * tensors["a.weight_scale_2"]
    expected = (levels[codes.int()].unflatten(-1, (-1, 16)) * scales.unsqueeze(-1)).flatten(-2)
    found = with_floats(handles(tensors))
    assert set(found) == {"a.weight"} and torch.equal(found["a.weight"].load(), expected)


def test_groups_that_are_larger_than_16() -> None:
    """ModelOpt's NVFP4_MLP_WEIGHT_ONLY_CFG has a scale per 32 values."""
    tensors = nvfp4()
    few = tensors["a.weight_scale"].view(torch.uint8)[:, ::2].contiguous()
    whole = tensors | {"a.weight_scale": few.repeat_interleave(2, 1).view(E4M3)}
    found = with_floats(handles(tensors | {"a.weight_scale": few.view(E4M3)}))["a.weight"].load()
    assert torch.equal(found, with_floats(handles(whole))["a.weight"].load())


def changed(name: str, value: torch.Tensor | None) -> dict[str, Weight]:
    tensors = {key: tensor for key, tensor in nvfp4().items() if key != name}
    return handles(tensors if value is None else {**tensors, name: value})


DAMAGED = [
    ("a.weight_scale", None, "is missing"),
    ("a.weight_scale_2", None, "is float8_e4m3fn"),
    ("a.weight_scale_2", torch.tensor(float("nan")), "NaN or Inf"),
    ("a.weight_scale_2", torch.ones(7), r"weight_scale_2.*is float32 \[7\]"),
    (
        "a.weight_scale",
        torch.zeros(24, 5, dtype=torch.uint8).view(E4M3),
        r"is float8_e4m3fn \[24, 5\] for 4-bit floats",
    ),
    ("a.weight_scale", torch.full((24, 12), 0x7F, dtype=torch.uint8).view(E4M3), "scales that are NaN"),
]


@pytest.mark.parametrize(("name", "value", "words"), DAMAGED)
def test_damage_is_one_line(name: str, value: torch.Tensor | None, words: str) -> None:
    with pytest.raises(TensorError, match=words):
        with_floats(changed(name, value))["a.weight"].load()


def test_damaged_blocks_are_one_line() -> None:
    codes, scales = blocks(2, 8, 64)
    for beside, words in ((scales[:, :, :1], r"is uint8 \[2, 8, 1\]"), (torch.full_like(scales, 255), "NaN")):
        with pytest.raises(TensorError, match=words):
            with_floats(handles({"x_blocks": codes, "x_scales": beside}))["x"].load()
    with pytest.raises(TensorError, match="'x_scales': is missing"):
        with_floats(handles({"x_blocks": codes}))


def test_what_is_refused_by_name(tmp_path: Path) -> None:
    for name in ("pre_quant_scale", "weight_zero_point"):
        with pytest.raises(UnsupportedModel, match=f"has a {name}"):
            with_floats(changed(f"a.{name}", torch.ones(192)))
    for facts in (
        {"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"},
        {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"},
        {
            "quant_method": "compressed-tensors",
            "format": "marlin-24",
            "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "float"}}},
        },
    ):
        with pytest.raises(UnsupportedModel, match="is already quantized"):
            packing_of({"quantization_config": facts}, tmp_path)


def test_what_config_json_says(tmp_path: Path) -> None:
    (tmp_path / "hf_quant_config.json").write_text(
        json.dumps({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}})
    )
    group = {"weights": {"num_bits": 4, "type": "float"}, "format": "mxfp4-pack-quantized"}
    groups = {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": {"group_0": group}}
    for config in ({}, {"quantization_config": {"quant_method": "mxfp4"}}, {"quantization_config": groups}):
        packing = packing_of(config, tmp_path)
        kind = CompressedPacking if config.get("quantization_config") is groups else E2m1Packing
        assert isinstance(packing, kind)

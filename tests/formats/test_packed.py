"""Checkpoints of packed integers: GPTQ, AWQ and compressed-tensors give the values that their libraries decode."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from building import build
from icc.compiler.errors import TensorError, UnsupportedModel
from icc.compiler.frontend.load import load_graph
from icc.compiler.frontend.source.packed import unpacked
from icc.compiler.frontend.source.packed_layers import (
    AwqLayer,
    GemvLayer,
    GptqLayer,
    Int8Layer,
    PackedLayer,
    WordsLayer,
)
from icc.compiler.frontend.source.packing import packing_of
from icc.compiler.frontend.source.packings import (
    AwqPacking,
    CompressedPacking,
    E2m1Packing,
    Float8Packing,
    GemvPacking,
    GptqPacking,
    Packing,
)
from icc.compiler.graph.interpret import interpret
from icc.compiler.graph.parser import parse_graph
from icc.compiler.ops import OPS
from icc.compiler.weights.formats.registry import find_format
from icc.compiler.weights.handles import Constant, SortedColumns
from icc.runtime.format.manifest import Limits
from run_lowered import lower_graph, optimize, run_lowered
from safetensors.torch import load_file, save_file
from sizes import soak
from test_ggml_kernels import few_blocks, int8_rows

__all__ = ["few_blocks"]
IDS = np.random.default_rng(0).integers(3, 119, 13).tolist()
Layer = tuple[dict[str, torch.Tensor], torch.Tensor]
KINDS = {"gptq": GptqPacking, "awq": AwqPacking, "gemv": GemvPacking, "compressed": CompressedPacking,
         "float8": Float8Packing, "e2m1": E2m1Packing}  # fmt: skip
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column in each field of a word


def packed(codes: torch.Tensor, bits: int, axis: int, order: tuple[int, ...] = ()) -> torch.Tensor:
    """Codes as int32 words along an axis, from the low bits up, without gaps."""
    if 32 % bits:
        stream = ((codes.to(torch.int64).movedim(axis, -1).unsqueeze(-1) >> torch.arange(bits)) & 1).flatten(-2)
        return packed(stream.movedim(-1, axis), 1, axis)
    each = 32 // bits
    fields = codes.to(torch.int64).movedim(axis, -1).unflatten(-1, (-1, each))[..., list(order or range(each))]
    words = (fields << torch.arange(0, 32, bits)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32).movedim(-1, axis).contiguous()


def layer(
    kind: str, n: int, k: int, bits: int, group: int, seed: int = 0, dtype: torch.dtype = torch.float16, act: int = 0
) -> Layer:
    """The tensors of a layer and its float32 values [n, k]. act: seed of the act-order permutation of columns; 0:
    none."""
    rng = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**bits, (n, k), generator=rng)
    zeros = torch.randint(1, 2**bits, (n, k // group), generator=rng)
    scales = (torch.rand(n, k // group, generator=rng) * 0.02 + 0.001).to(dtype)
    if kind.startswith("int8") and kind != "int8_zeros":
        zeros[:] = 128
    if kind == "int8_one":
        scales[:] = scales[0]
    index = torch.arange(k) // group
    if act:
        index = index[torch.randperm(k, generator=torch.Generator().manual_seed(act))]
    values = (codes - zeros[:, index]) * scales.float()[:, index]
    if kind.startswith("gptq"):
        shown = zeros if kind == "gptq_v2" else zeros - 1
        found = {"qweight": packed(codes.T, bits, 0), "qzeros": packed(shown.T, bits, 1), "scales": scales.T}
        found["g_idx"] = index.to(torch.int32)
    elif kind == "awq":
        found = {"qweight": packed(codes.T, 4, 1, AWQ_ORDER), "qzeros": packed(zeros.T, 4, 1, AWQ_ORDER)}
        found["scales"] = scales.T
    elif kind == "gemv":  # rows of scales and zeros are padded to whole words
        words, many = packed(codes, 4, 1), (-(k // group)) % (8 * max(128 // group, 1))
        pad = torch.nn.functional.pad
        found = {"qweight": words, "qzeros": packed(pad(zeros, (0, many)), 4, 1), "scales": pad(scales, (0, many))}
    elif kind.startswith("int8"):
        found = {"weight": (codes - 128).to(torch.int8), "weight_scale": scales[0] if kind == "int8_one" else scales}
        found |= {"weight_zero_point": (zeros - 128).to(torch.int8)} if kind == "int8_zeros" else {}
    else:
        found = {"weight_packed": packed(codes, bits, 1), "weight_scale": scales, "weight_shape": torch.tensor([n, k])}
        found["weight_zero_point"] = packed(zeros, bits, 0)
        found |= {"weight_g_idx": index.to(torch.int32)} if act else {}
    return {name: value.contiguous() for name, value in found.items()}, values


CASES = [
    ("gptq", GptqLayer, GptqPacking(4, True), 4, 32), ("gptq_v2", GptqLayer, GptqPacking(8), 8, 64),
    ("awq", AwqLayer, AwqPacking(4), 4, 32), ("gemv", GemvLayer, GemvPacking(4, 32), 4, 32),
    ("gemv", GemvLayer, GemvPacking(4, 128), 4, 128), ("compressed", WordsLayer, CompressedPacking(8), 4, 32),
    ("compressed", WordsLayer, CompressedPacking(4), 4, 128), ("compressed", WordsLayer, CompressedPacking(8), 8, 32),
    ("int8", Int8Layer, CompressedPacking(8), 8, 128), ("int8", Int8Layer, CompressedPacking(8), 8, 32),
    ("int8_one", Int8Layer, CompressedPacking(8), 8, 128), ("int8_zeros", Int8Layer, CompressedPacking(4), 8, 128),
    ("int8_zeros", Int8Layer, CompressedPacking(8), 8, 64),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "made", "packing", "bits", "group"), CASES)
def test_values_of_a_layer(kind: str, made: type[PackedLayer], packing: Packing, bits: int, group: int) -> None:
    tensors, values = layer(kind, 24, 128, bits, group)
    weight = made("a.b", {name: Constant(value) for name, value in tensors.items()}, packing)
    assert weight.describe() == f"zq{bits}g{group}[24, 128]"
    assert torch.equal(weight.load(), values)


@pytest.mark.parametrize("bits", [2, 3])
def test_fewer_bits_are_stored_in_four(bits: int) -> None:
    """Codes of 3 bits cross from one word to the next."""
    tensors, values = layer("gptq", 32, 128, bits, 64, act=5)
    handles = {f"a.b.{name}": Constant(value) for name, value in tensors.items()}
    packing = packing_of({"quantization_config": {"quant_method": "gptq", "bits": bits}}, Path())
    assert packing is not None
    weight = unpacked(handles, packing)["a.b.weight"]
    assert isinstance(weight, SortedColumns) and weight.source.describe() == "zq4g64[32, 128]"
    assert torch.equal(weight.load(), values)


CONFIGS: dict[str, dict[str, Any]] = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 32},
    "act-order": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"},
    "compressed": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int", "group_size": 32}}},
    },
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_models(kind: str, tiny: ModuleType, tmp_path: Path) -> None:
    model = tiny.save_tiny(tiny.tiny_configs()["llama"], tmp_path, dtype="float16")
    tensors = load_file(tmp_path / "model.safetensors")
    for number, name in enumerate(sorted(n for n in tensors if "proj" in n)):
        n, k = tensors.pop(name).shape
        ordered = kind == "act-order"
        act = (
            0
            if not ordered
            else 1
            if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))
            else number + 2
        )
        own, values = layer("gptq" if ordered else kind, n, k, 4, 32, number, act=act)
        tensors |= {f"{name.removesuffix('.weight')}.{part}": value for part, value in own.items()}
        model.get_parameter(name).data.copy_(values)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": CONFIGS[kind]}))
    ids = np.random.default_rng(0).integers(3, 119, 13).tolist()
    graph = load_graph(tmp_path, 64)
    stored = [w.source if isinstance(w, SortedColumns) else w for w in graph.weights.values()]
    assert sum(w.describe().startswith("zq4g32") for w in stored) == 14
    expected = tiny.reference_logits(model, ids)
    assert float((interpret(graph, ids) - expected).abs().max() / expected.abs().max()) < 2e-5


@pytest.mark.parametrize(
    ("kind", "family"),
    [
        ("act-order", "mixtral"),
        *soak(
            ("gptq", "mixtral"),
            ("awq", "qwen3_moe"),
            ("act-order", "qwen3_moe"),
            ("compressed", "deepseek_v3-latent_grouped_routing"),
            ("act-order", "deepseek_v3-latent_grouped_routing"),
        ),
    ],
)
def test_experts(kind: str, family: str, tiny: ModuleType, tmp_path: Path) -> None:
    """The file has a tensor per expert, the graph one weight for all experts with the stored codes. With act-order, the
    columns of each expert have their own order; gate and up of some experts have different ones."""
    model = tiny.save_tiny(tiny.tiny_configs()[family], tmp_path, dtype="float16")
    tensors = load_file(tmp_path / "model.safetensors")
    kept = dict(tensors)
    for number, name in enumerate(sorted(n for n in tensors if ".experts." in n)):
        n, k = tensors.pop(name).shape
        expert = number if "0." in name or "down" in name else number // 3
        act = 0 if kind != "act-order" else 1 + expert
        own, kept[name] = layer("gptq" if act else kind, n, k, 4, 16, number, act=act)
        tensors |= {f"{name.removesuffix('.weight')}.{part}": value for part, value in own.items()}
    config = json.loads((tmp_path / "config.json").read_text())
    expected = with_values(model, tmp_path, kept)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": CONFIGS[kind]}))
    graph = load_graph(tmp_path, 64)
    optimize(graph)
    stored = [w.describe() for name, w in graph.weights.items() if ".experts." in name]
    assert stored and all(text.startswith("zq4g16[") for text in stored)
    assert float((interpret(graph, IDS) - expected).abs().max() / expected.abs().max()) < 2e-5


def with_values(model: Any, folder: Path, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """The logits [T, vocab] of transformers' model with these tensors."""
    save_file({name: value.float() for name, value in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    again = type(model).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return tiny_models.reference_logits(again, IDS)


def in_order(checkpoint: Path, *which: str) -> None:
    """Store the weights whose names have one of `which` as GPTQ with act-order does, each with its own order of
    columns."""
    tensors = load_file(checkpoint / "model.safetensors")
    for number, name in enumerate(sorted(n for n in tensors if any(part in n for part in which))):
        own, _ = layer("gptq", *tensors.pop(name).shape, 4, 16, number, act=number + 1)
        tensors |= {f"{name.removesuffix('.weight')}.{part}": value for part, value in own.items()}
    save_file(tensors, checkpoint / "model.safetensors", {"format": "pt"})
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"quantization_config": CONFIGS["act-order"]}))


def test_an_engine_with_columns_in_order_in_the_interpreted_plan(tiny: ModuleType, tmp_path: Path) -> None:
    tiny.save_tiny(tiny.tiny_configs()["mixtral"], tmp_path)
    in_order(tmp_path, "proj", ".experts.")
    engine = build(tmp_path, limits=Limits(max_seq_len=20, max_batch_size=2, max_step_tokens=16), block_size=4)
    ops = Counter(node.target for node in engine.graph.nodes)
    # each layer has its own orders, and so has each expert's gate and up, whose rows have the order of down's columns
    assert (ops[OPS["columns"].overload], ops[OPS["expert_columns"].overload]) == (8, 4)
    found, expected = engine.llm().logits(IDS), interpret(engine.graph, IDS).numpy()
    assert np.abs(found - expected).max() < 1e-2 * np.abs(expected).max()  # activations are bf16


def test_other_packings_are_refused_by_name(tiny: ModuleType, tmp_path: Path) -> None:
    tiny.save_tiny(tiny.tiny_configs()["llama"], tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for facts, words in (
        ({"quant_method": "awq", "bits": 4, "version": "gemv_fast"}, r"already quantized \(awq gemv_fast\)"),
        ({"quant_method": "gptq", "bits": 5}, r"already quantized \(gptq\)"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "compressed-tensors marlin-24"),
        ({"quant_method": "quanto", "load_in_4bit": True}, "already quantized"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": facts}))
        with pytest.raises(UnsupportedModel, match=words):
            load_graph(tmp_path)


INTS = {"num_bits": 4, "type": "int", "group_size": 128}


def quark(weight: dict[str, Any], other: dict[str, Any] | None = None) -> dict[str, Any]:
    """The configuration that AMD's Quark writes into config.json; other: for some layers; None: all are alike."""
    layers = {"*k_proj": {"weight": other}} if other else {}
    return {"quant_method": "quark", "global_quant_config": {"weight": weight}, "layer_quant_config": layers}


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:auto_gptq"}, ("gptq", 4, True)),
        ({"quant_method": "intel/auto-round", "bits": 8, "backend": "auto_round"}, ("gptq", 8, False)),
        ({"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:auto_awq"}, ("awq", 4, False)),
        ({"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:llm_compressor"},
         ("compressed", 4, False)),
        ({"quant_method": "awq", "bits": 4, "version": "exllama"}, ("awq", 4, False)),
        ({"quant_method": "awq", "bits": 4, "version": "GEMV", "q_group_size": 64}, ("gemv", 4, False)),
        ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, None),
        ({"quant_method": "auto-round", "bits": 4, "data_type": "mx_fp"}, None),
        ({"quant_method": "auto-round", "bits": 2, "packing_format": "auto_round:auto_gptq"}, ("gptq", 2, True)),
        ({"quant_method": "auto-round", "bits": 5, "packing_format": "auto_round:auto_gptq"}, None),
        ({"quant_method": "auto-round", "bits": 2, "packing_format": "auto_round:llm_compressor"}, None),
        (quark({"dtype": "fp8_e4m3", "qscheme": "per_tensor"}), ("float8", 8, False)),
        (quark({"dtype": "fp4", "qscheme": "per_group", "group_size": 32},
               {"dtype": "fp8_e4m3", "qscheme": "per_channel"}), ("e2m1", 4, False)),
        (quark({"dtype": "fp4", "qscheme": "per_group", "group_size": 16}), None),
        (quark({"dtype": "uint4", "qscheme": "per_group", "group_size": 128}), None),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized",
          "config_groups": {"a": {"weights": INTS}, "b": {"weights": {**INTS, "num_bits": 8}}}},
         ("compressed", 8, False)),
        ({"quant_method": "compressed-tensors", "format": "mixed-precision",
          "config_groups": {"a": {"weights": INTS, "format": "pack-quantized"},
                            "b": {"weights": {**INTS, "num_bits": 8}, "format": "int-quantized"}}},
         ("compressed", 8, False)),
        ({"quant_method": "compressed-tensors", "format": "mixed-precision",
          "config_groups": {"a": {"weights": INTS, "format": "pack-quantized"},
                            "b": {"weights": {**INTS, "num_bits": 3}, "format": "pack-quantized"}}}, None),
    ],
)  # fmt: skip
def test_packings_by_another_name(facts: dict[str, Any], expected: tuple[Any, ...] | None, tmp_path: Path) -> None:
    if expected is None:
        with pytest.raises(UnsupportedModel, match="already quantized"):
            packing_of({"quantization_config": facts}, tmp_path)
    else:
        found = packing_of({"quantization_config": facts}, tmp_path)
        assert found == packing_of({"compression_config": facts}, tmp_path)  # its earlier name
        kind, bits, one_less = expected
        assert type(found) is KINDS[kind] and found.bits == bits and getattr(found, "one_less", False) == one_less


def test_layers_of_every_kind_in_one_checkpoint() -> None:
    """As compressed-tensors' mixed-precision writes them: the tensors of each layer decide how it is read."""
    codes = torch.randn(24, 128).to(torch.float8_e4m3fn)
    own, values = layer("compressed", 24, 128, 4, 32)
    ints, wholes = layer("int8_zeros", 24, 128, 8, 128)
    plain = torch.randn(24, 128).to(torch.bfloat16)
    tensors = {
        **{f"a.{name}": value for name, value in own.items()}, **{f"b.{name}": value for name, value in ints.items()},
        "c.weight": codes, "c.weight_scale": torch.full((24, 4), 118, dtype=torch.uint8), "d.weight": plain,
        "c.input_scale": torch.ones(1),
    }  # fmt: skip
    found = unpacked({name: Constant(value) for name, value in tensors.items()}, CompressedPacking(4))
    assert torch.equal(found["a.weight"].load(), values) and torch.equal(found["b.weight"].load(), wholes)
    assert torch.equal(found["c.weight"].load(), codes.float() * 2.0**-9) and found["d.weight"].load() is plain
    assert [found[f"{name}.weight"].describe() for name in "abc"] == [
        "zq4g32[24, 128]", "zq8g128[24, 128]", "e4m3_kg32[24, 128]"
    ]  # fmt: skip


@pytest.mark.parametrize(
    "facts",
    [
        {
            "quant_method": "compressed-tensors",
            "format": "dense",
            "config_groups": {},
            "kv_cache_scheme": {"num_bits": 8},
        },
        {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"},
    ],
)
def test_nothing_is_packed_where_only_the_cache_is_quantized(facts: dict[str, Any], tmp_path: Path) -> None:
    assert packing_of({"quantization_config": facts}, tmp_path) is None


@pytest.mark.parametrize(("kind", "bits"), [("gptq", 4), ("gptq", 8), ("compressed", 4)])
def test_columns_in_the_order_of_activations(kind: str, bits: int) -> None:
    """Columns are stored group by group, and the values are those of the file."""
    tensors, values = layer(kind, 24, 128, bits, 32, act=7)
    handles = {f"a.b.{name}": Constant(value) for name, value in tensors.items()}
    packing = GptqPacking(bits, True) if kind == "gptq" else CompressedPacking(bits)
    weight = unpacked(handles, packing)["a.b.weight"]
    assert isinstance(weight, SortedColumns) and weight.source.describe() == f"zq{bits}g32[24, 128]"
    assert torch.equal(weight.load(), values)


@pytest.mark.parametrize("wrong", [[0] * 128, [0, 1, 2, 9] * 32, [-3] * 128, [0, 1, 2, 3]])
def test_a_damaged_order_is_refused(wrong: list[int]) -> None:
    tensors, _ = layer("gptq", 24, 128, 4, 32)
    tensors["g_idx"] = torch.tensor(wrong, dtype=torch.int32)
    with pytest.raises(TensorError, match="a g_idx that does not give each group 32 of 128 columns"):
        GptqLayer("a.b", {name: Constant(value) for name, value in tensors.items()}, GptqPacking(4, True))


@pytest.mark.parametrize(("bits", "dtype"), [(4, torch.float16), (8, torch.bfloat16)])
def test_on_the_cpu(bits: int, dtype: torch.dtype, tmp_path: Path, few_blocks: None) -> None:
    graph = parse_graph(
        "graph(%token_ids: i64[T]):\n"
        "  %0: f32[T, 256] = icc.embedding(%token_ids, @table: f32[40, 256])\n"
        "  %1: f32[T, 35] = icc.linear(%0, @w: f32[35, 256], None)\n"
        "  return %1\n"
    )
    for seed, (name, n) in enumerate([("table", 40), ("w", 35)]):
        tensors, _ = layer("gptq_v2", 40, 256, bits, 64, seed, dtype)
        whole = GptqLayer(name, {part: Constant(value) for part, value in tensors.items()}, GptqPacking(bits))
        graph.weights[name] = whole if n == 40 else _first(whole, n)
    kind = f"zq{bits}{'_bf16' if dtype == torch.bfloat16 else ''}g64"
    lowered = lower_graph(optimize(graph))
    assert {w.format for w in lowered.program.weights.values()} == {kind}
    assert find_format(kind).name == kind
    ids = np.random.default_rng(0).integers(0, 40, 11).tolist()
    found = run_lowered(lowered, tmp_path, ids)
    x = int8_rows(graph.weights["table"].load()[ids], find_format(kind).row_group)
    expected = x @ graph.weights["w"].load().double().T
    assert np.abs(found - expected.numpy()).max() < 2e-5 * float(expected.abs().max())


def _first(weight: PackedLayer, rows: int) -> Any:
    from icc.compiler.weights.handles import GivenRows

    return GivenRows((weight,), torch.arange(rows))

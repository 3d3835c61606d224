"""Finds how the weights of a checkpoint are packed from its config.json; packed.py reads them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from ...errors import CheckpointError, UnsupportedModel
from .packings import (
    AwqPacking,
    BitnetPacking,
    BitsandbytesPacking,
    CompressedPacking,
    E2m1Packing,
    Float8Packing,
    GemvPacking,
    GptqPacking,
    HqqPacking,
    LayerBits,
    MlxPacking,
    Packing,
)

GPTQ_BITS = (2, 3, 4, 8)
# scales that quantizers found for activations and KV caches; ignored, as rows and caches get their own
OF_ACTIVATIONS = re.compile(r"\.(input|output|activation|q|k|v|kv|prob)(_global)?_(scale|zero_point)(_inv)?$")


def packing_of(config: Mapping[str, Any], path: Path) -> Packing | None:
    """How a checkpoint is packed, from its config.json; None if it is not. UnsupportedModel names a method that icc
    cannot read; CheckpointError if its description in config.json is damaged."""
    facts = _stated(config) or _beside(path)
    if facts is None:
        return None
    method = str(facts.get("quant_method") or "unknown method")
    made = _READ.get(method)
    try:
        if _only_cache(method, facts):
            return None
        packing = made(facts) if made else None
    except (TypeError, AttributeError, ValueError) as error:  # a fact has a wrong type
        raise CheckpointError(
            f"the quantization_config of {path} is not one of {method}: {error}", "download its config.json again"
        ) from error
    if packing is None:
        names = ("quant_algo", "mode", "quantization_mode", "format", "checkpoint_format", "version", "fmt")
        what = next((facts[name] for name in names if facts.get(name)), "")
        raise UnsupportedModel(
            f"{path} is already quantized ({' '.join([method, str(what)]).strip()})",
            "icc reads GPTQ, AWQ, AutoRound and pack-quantized weights of 4 and 8 bits, bitsandbytes, MLX, "
            "HQQ, BitNet, MXFP4, NVFP4 and 8-bit floats (e4m3); or give the unquantized checkpoint",
        )
    return packing


def _only_cache(method: str, facts: Mapping[str, Any]) -> bool:
    """Whether only the KV cache is quantized, which `--kv-cache` decides."""
    if method == "compressed-tensors":
        return bool(facts.get("kv_cache_scheme")) and not _groups(facts)
    return method == "modelopt" and bool(facts.get("kv_cache_quant_algo")) and not facts.get("quant_algo")


def _gptq(facts: Mapping[str, Any]) -> Packing | None:
    kind, bits = facts.get("checkpoint_format") or "gptq", facts.get("bits")
    kind = "marlin" if facts.get("is_marlin_format") else kind  # an older key
    return GptqPacking(bits, kind == "gptq") if kind in ("gptq", "gptq_v2") and bits in GPTQ_BITS else None


def _awq(facts: Mapping[str, Any]) -> Packing | None:
    version = str(facts.get("version") or facts.get("format") or "gemm").lower()
    if facts.get("bits", facts.get("w_bit", 4)) != 4:
        return None
    if version == "gemv":
        group = facts.get("q_group_size", facts.get("group_size", 128))
        return GemvPacking(4, group) if group in (32, 64, 128) else None
    return AwqPacking(4) if version in ("gemm", "exllama", "ipex") else None  # kernels for gemm's order


def _auto_round(facts: Mapping[str, Any]) -> Packing | None:
    """AutoRound's formats, which are GPTQ's, AWQ's and compressed-tensors'; only `auto_gptq` stores zeros minus one."""
    form = str(facts.get("packing_format") or facts.get("backend") or "auto_round").rpartition(":")[2]
    if facts.get("bits") not in GPTQ_BITS:
        return None
    if form == "llm_compressor":  # integers or floats, as the tensors show
        known = facts["bits"] in (4, 8)
        return CompressedPacking(facts["bits"], alone=facts.get("act_bits", 16) > 8) if known else None
    if facts.get("data_type") not in (None, "int"):
        return None
    if form == "auto_awq":
        return AwqPacking(4) if facts["bits"] == 4 else None
    known = {"auto_gptq": True, "auto_round": False, "gptqmodel": False}
    return GptqPacking(facts["bits"], known[form]) if form in known else None


_LAYOUTS = {  # formats of compressed-tensors -> types and bits of their codes
    "pack-quantized": {("int", 4), ("int", 8)}, "int-quantized": {("int", bits) for bits in range(1, 9)},
    "naive-quantized": {("int", 8), ("float", 8)}, "float-quantized": {("float", 8)}, "mxfp8-quantized": {("float", 8)},
    "nvfp4-pack-quantized": {("float", 4)}, "mxfp4-pack-quantized": {("float", 4)},
    "mixed-precision": {("int", 4), ("int", 8), ("float", 4), ("float", 8)},
}  # fmt: skip


def _compressed(facts: Mapping[str, Any]) -> Packing | None:
    """Groups of layers, each in its own format or in the common one; a layer's tensors show its format."""
    groups, bits = _groups(facts), 8
    sparse = (facts.get("sparsity_config") or {}).get("format") or "dense"
    if not groups or sparse != "dense" or facts.get("transform_config"):
        return None
    for group in groups:
        kind, bits = str(group["weights"].get("type")), group["weights"].get("num_bits")
        if (kind, bits) not in _LAYOUTS.get(str(group.get("format") or facts.get("format")), ()):
            return None
    block = _one_block(group["weights"].get("block_structure") for group in groups)
    return CompressedPacking(bits, block, alone=not any(group.get("input_activations") for group in groups))


def _groups(facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The groups of a compressed-tensors configuration whose weights are quantized."""
    groups = (facts.get("config_groups") or {}).values()
    return [group for group in groups if isinstance(group, dict) and group.get("weights")]


def _fp8(facts: Mapping[str, Any]) -> Packing | None:
    """Hugging Face's own fp8, and AutoFP8's of the same name."""
    known = facts.get("fmt") in (None, "e4m3", "float8_e4m3fn") and facts.get("expert_dtype") in (None, "fp8")
    return Float8Packing(8, block=_one_block([facts.get("weight_block_size")])) if known else None


def _modelopt(facts: Mapping[str, Any]) -> Packing | None:
    algorithms = {str(facts.get("quant_algo") or "").upper()}
    if algorithms == {"MIXED_PRECISION"}:
        layers = (facts.get("quantized_layers") or {}).values()
        algorithms = {str(layer.get("quant_algo") or "").upper() for layer in layers if isinstance(layer, dict)}
    known = bool(algorithms) and algorithms <= {"FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4", "W4A16_NVFP4"}
    floats = any(algorithm.endswith("NVFP4") for algorithm in algorithms)
    alone = "FP8_PB_WO" in algorithms
    return (E2m1Packing(4) if floats else Float8Packing(8, alone=alone)) if known else None


def _quark(facts: Mapping[str, Any]) -> Packing | None:
    """AMD's Quark: 8-bit floats with scales per tensor or channel, and MXFP4; layers may have their own
    configuration."""
    if (facts.get("export") or {}).get("weight_format") not in (None, "real_quantized"):
        return None
    parts = [facts.get("global_quant_config") or {}, *(facts.get("layer_quant_config") or {}).values()]
    weights = [part["weight"] for part in parts if part.get("weight")]
    kinds = {(weight.get("dtype"), weight.get("qscheme")) for weight in weights}
    kinds |= {("", "") for weight in weights if weight.get("dtype") == "fp4" and weight.get("group_size") != 32}
    if not kinds or not kinds <= {("fp8_e4m3", "per_tensor"), ("fp8_e4m3", "per_channel"), ("fp4", "per_group")}:
        return None
    alone = not any(part.get("input_tensors") for part in parts)
    return E2m1Packing(4) if ("fp4", "per_group") in kinds else Float8Packing(8, alone=alone)


def _bitsandbytes(facts: Mapping[str, Any]) -> Packing | None:
    eight = facts.get("load_in_8bit") or facts.get("_load_in_8bit")
    return BitsandbytesPacking(8 if eight else 4)


_MLX_FLOATS = {"mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}  # (bits, values per group)


def _mlx(facts: Mapping[str, Any]) -> Packing | None:
    """mlx_lm: bits, group and mode of all layers, and exceptions by layer name; false for a layer that is not
    quantized."""

    def stored(of: Mapping[str, Any]) -> LayerBits | None:
        mode, bits, group = of.get("mode", "affine"), of.get("bits"), of.get("group_size")
        if not isinstance(bits, int) or not isinstance(group, int):
            return None
        affine = mode == "affine" and bits in (2, 3, 4, 5, 6, 8) and group > 0 and group % 16 == 0
        return LayerBits(bits, group, mode) if affine or _MLX_FLOATS.get(mode) == (bits, group) else None

    own = {name: {**facts, **of} for name, of in facts.items() if isinstance(of, dict)}
    found = {name: stored(of) for name, of in {"": facts, **own}.items()}
    if None in found.values():
        return None
    return MlxPacking(facts["bits"], {name: of for name, of in found.items() if of is not None})


def _bitnet(facts: Mapping[str, Any]) -> Packing | None:
    """BitNet's packed weights. None if weights are quantized at each use, or if layers have their own norm."""
    if facts.get("quantization_mode") == "online" or facts.get("use_rms_norm"):
        return None
    return BitnetPacking(2, facts.get("linear_class", "bitlinear") == "bitlinear")


def _one_block(stated: Iterable[Any]) -> tuple[int, int] | None:
    """The (rows, columns) that all state, as [rows, columns] or "rows x columns"; None if they state none or
    several."""
    try:
        found = {tuple(size.lower().split("x") if isinstance(size, str) else size or ()) for size in stated}
        ((rows, columns),) = [[int(size) for size in block] for block in found]
    except (TypeError, ValueError):
        return None
    return (rows, columns) if rows > 0 and columns > 0 else None


_READ: dict[str, Callable[[Mapping[str, Any]], Packing | None]] = {
    "gptq": _gptq, "awq": _awq, "compressed-tensors": _compressed, "fp8": _fp8, "modelopt": _modelopt,
    "fbgemm_fp8": lambda facts: Float8Packing(8), "mxfp4": lambda facts: E2m1Packing(4),
    "bitsandbytes": _bitsandbytes, "auto-round": _auto_round, "intel/auto-round": _auto_round, "quark": _quark,
    "mlx": _mlx, "bitnet": _bitnet, "hqq": lambda facts: HqqPacking(4),
}  # fmt: skip


def _beside(path: Path) -> Mapping[str, Any] | None:
    """The content of ModelOpt's hf_quant_config.json; None if there is none or it quantizes no weights. CheckpointError
    if it is damaged."""
    file = path / "hf_quant_config.json"
    if not file.is_file():
        return None
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        facts = found["quantization"]
        producer = (found.get("producer") or {}).get("name", "modelopt")
        return {"quant_method": producer, **facts} if facts.get("quant_algo") else None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{file} does not say how the model is quantized", "download it again") from error


def _stated(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The quantization section of config.json, wherever it is; None if there is none."""
    text, own = config.get("text_config"), config.get("quantization")
    named = config.get("quantization_config")
    if isinstance(own, dict) and "bits" in own and (not named or named == own):
        return {"quant_method": "mlx", **own}  # mlx_lm writes its own key, and a copy under the common one
    found = config.get("quantization_config") or config.get("compression_config")  # an older key
    found = found or (text.get("quantization_config") if isinstance(text, dict) else None)
    if not found:
        return None
    if not isinstance(found, dict):
        return {"quant_method": str(found)}
    inner = found.get("quantization")  # the form of hf_quant_config.json
    return {**found, **inner} if isinstance(inner, dict) else found

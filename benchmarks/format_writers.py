"""Writes a small Llama in each storage format that icc reads, by the format's own library or else by its formula."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HERE = Path(__file__).parent
SHAPE: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
GGUF = (
    "Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS MXFP4 IQ2_XS IQ3_S TQ2_0 F16 BF16".split()
)  # fmt: skip
Written = tuple[Any, dict[str, Tensor]]  # the model with a file's values, and its quantized matrices by name


def tiny_model() -> Any:
    """A random Llama in which every layer affects the logits."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE), attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        parameter.data = torch.ones_like(parameter) if "norm" in name else 0.06 * torch.randn_like(parameter)
    return model


def matrices(model: Any) -> dict[str, Tensor]:
    return {name: p.data for name, p in model.named_parameters() if "proj" in name}


def write_gguf(kind: str, folder: Path) -> Written:
    """Write a GGUF file by the gguf package: its quantizers if it has them, else random blocks."""
    sys.path.insert(0, str(HERE.parent / "tests/formats"))
    from gguf_models import write_model

    model = write_model(tiny_model(), "llama", folder / "model.gguf", lambda name: "F16" if "token" in name else kind)
    return model, matrices(model) | {"lm_head.weight": model.lm_head.weight.data}


def write_checkpoint(config: dict[str, Any], pack: Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]) -> Any:
    """A writer of safetensors; `pack` turns a layer's matrix into (stored tensors, their values)."""

    def write(folder: Path) -> Written:
        from safetensors.torch import load_file, save_file

        model = tiny_model()
        model.to(torch.float16).save_pretrained(folder)
        model.to(torch.float32)
        tensors = load_file(folder / "model.safetensors")
        for name, parameter in matrices(model).items():
            stored, values = pack(parameter.data)
            parameter.data.copy_(values)
            del tensors[name]
            tensors |= {f"{name.removesuffix('weight')}{part}": value for part, value in stored.items()}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        facts = json.loads((folder / "config.json").read_text()) | {"quantization_config": config}
        (folder / "config.json").write_text(json.dumps(facts))
        return model, matrices(model)

    return write


def words(codes: Tensor, bits: int, axis: int, order: tuple[int, ...] = ()) -> Tensor:
    """Pack codes into int32 words along an axis, from the low bits up, in the given order within a word."""
    each = 32 // bits
    fields = codes.to(torch.int64).movedim(axis, -1).unflatten(-1, (-1, each))[..., list(order or range(each))]
    packed = (fields << torch.arange(0, 32, bits)).sum(-1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32).movedim(-1, axis).contiguous()


def asymmetric(weight: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantize: codes [N, K], zeros and float16 scales [N, K / group], values [N, K]."""
    groups = weight.unflatten(-1, (-1, group))
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scales = ((high - low) / (2**bits - 1)).to(torch.float16)
    zeros = (-low / scales.float()).round().clamp(1, 2**bits - 1)
    spread = scales.float().unsqueeze(-1)
    codes = (groups / spread + zeros.unsqueeze(-1)).round().clamp(0, 2**bits - 1)
    return codes.flatten(-2), zeros, scales, ((codes - zeros.unsqueeze(-1)) * spread).flatten(-2)


def gptq(bits: int) -> Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]:
    def pack(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        codes, zeros, scales, values = asymmetric(weight, bits, 128)
        found = {"qweight": words(codes.T, bits, 0), "qzeros": words(zeros.T - 1, bits, 1)}
        index = (torch.arange(weight.shape[1]) // 128).to(torch.int32)
        return found | {"scales": scales.T.contiguous(), "g_idx": index}, values

    return pack


def awq(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    codes, zeros, scales, values = asymmetric(weight, 4, 128)
    found = {"qweight": words(codes.T, 4, 1, order), "qzeros": words(zeros.T, 4, 1, order)}
    return found | {"scales": scales.T.contiguous()}, values


def compressed(form: str, **arguments: Any) -> Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]:
    """A `pack` for `write_checkpoint`: compressed-tensors' own compressor of a format, and its decompression."""

    def pack(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
        from compressed_tensors.quantization.utils import calculate_qparams

        args = QuantizationArgs(symmetric=True, **arguments)
        scheme = QuantizationScheme(targets=["Linear"], weights=args)
        groups = weight.unflatten(-1, (-1, arguments.get("group_size") or weight.shape[-1]))
        low, high = groups.amin(-1), groups.amax(-1)
        if arguments["strategy"] == "tensor":
            low, high = low.min().reshape(1), high.max().reshape(1)
        state: dict[str, Tensor] = {"weight": weight}
        if form == "nvfp4-pack-quantized":
            state["weight_global_scale"] = (448 * 6 / weight.abs().max()).reshape(1)
            peak = groups.abs().amax(-1)
            scale = (state["weight_global_scale"] * peak / 6).to(torch.float8_e4m3fn).to(torch.float32)
        elif form == "mxfp4-pack-quantized":
            scale = torch.exp2(torch.floor(torch.log2(groups.abs().amax(-1))) - 2)
        else:
            scale = calculate_qparams(low, high, args)[0].to(torch.float16).to(torch.float32)
        state["weight_scale"] = scale
        compressor: Any = BaseCompressor.get_value_from_registry(form)
        stored = compressor.compress(state, scheme)
        return stored, compressor.decompress(stored, scheme)["weight"].to(torch.float32)

    return pack


def blockwise(kind: str, nested: bool) -> Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]:
    """A `pack` for `write_checkpoint`: bitsandbytes' 4-bit blocks, and its dequantization."""

    def pack(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        from bitsandbytes import functional  # type: ignore[reportMissingImports]

        codes, state = functional.quantize_4bit(weight, blocksize=64, compress_statistics=nested, quant_type=kind)
        stored = {"weight": codes} | {f"weight.{name}": value for name, value in state.as_dict(packed=True).items()}
        return stored, functional.dequantize_4bit(codes, state)

    return pack


def vectorwise(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """A `pack` for `write_checkpoint`: LLM.int8's rows with a scale each, and their values."""
    from bitsandbytes import functional  # type: ignore[reportMissingImports]

    codes, scales, _ = functional.int8_vectorwise_quant(weight.to(torch.float16))
    return {"weight": codes, "SCB": scales}, functional.int8_vectorwise_dequant(codes, scales).to(torch.float32)


def modelopt(kind: str) -> Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]:
    """A `pack` for `write_checkpoint`: ModelOpt's tensors as it exports them, and their dequantization."""

    def pack(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        from modelopt.torch.quantization.qtensor import FP8QTensor, NVFP4QTensor  # type: ignore[reportMissingImports]

        if kind == "FP8":
            whole, scale = FP8QTensor.quantize(weight, scales=(weight.abs().max() / 448).reshape(1))
            stored = {"weight": whole._quantized_data, "weight_scale": scale.reshape(()).to(torch.float32)}
            return stored, whole.dequantize(torch.float32, scale=scale)
        whole, scales, one = NVFP4QTensor.quantize(weight, 16)
        stored = {"weight": whole._quantized_data, "weight_scale": scales, "weight_scale_2": one.to(torch.float32)}
        values = whole.dequantize(torch.float32, scale=scales, double_scale=one, block_sizes={-1: 16})
        return stored, values

    return pack


def fp8(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """A `pack` for `write_checkpoint`: transformers' own FP8 quantizer, in DeepSeek's blocks, and the values."""
    from types import SimpleNamespace

    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

    own: Any = SimpleNamespace(quantization_config=SimpleNamespace(weight_block_size=(128, 128), scale_fmt="float"))
    found = Fp8Quantize(own)._quantize_one("weight", weight)
    values = Fp8Dequantize(own)._dequantize_one(found["weight"], found["weight_scale_inv"], torch.float32)
    return found, values


def scheme(form: str, bits: int, kind: str) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": bits, "type": kind}, "format": form}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"a": group}, "ignore": ["lm_head"]}


def own(quant: str) -> Callable[[Path], Written]:
    def write(folder: Path) -> Written:
        model = tiny_model()
        model.save_pretrained(folder)
        return model, {}

    return write


BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True}
CHECKPOINTS: dict[str, tuple[str, Callable[[Path], Written]]] = {
    "GPTQ 4": ("formula", write_checkpoint({"quant_method": "gptq", "bits": 4, "group_size": 128}, gptq(4))),
    "GPTQ 8": ("formula", write_checkpoint({"quant_method": "gptq", "bits": 8, "group_size": 128}, gptq(8))),
    "AWQ": ("formula", write_checkpoint({"quant_method": "awq", "bits": 4, "group_size": 128}, awq)),
    "W4A16": (
        "compressed-tensors",
        write_checkpoint(
            scheme("pack-quantized", 4, "int"),
            compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=128),
        ),
    ),
    "W8A8": (
        "compressed-tensors",
        write_checkpoint(
            scheme("int-quantized", 8, "int"), compressed("int-quantized", num_bits=8, type="int", strategy="channel")
        ),
    ),
    "FP8 channel": (
        "compressed-tensors",
        write_checkpoint(
            scheme("float-quantized", 8, "float"),
            compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
        ),
    ),
    "FP8 128x128": (
        "transformers", write_checkpoint({"quant_method": "fp8", "weight_block_size": [128, 128]}, fp8),
    ),
    "NVFP4": (
        "compressed-tensors",
        write_checkpoint(
            scheme("nvfp4-pack-quantized", 4, "float"),
            compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16),
        ),
    ),
    "bitsandbytes NF4": ("bitsandbytes", write_checkpoint(BNB, blockwise("nf4", False))),
    "bitsandbytes NF4 nested": ("bitsandbytes", write_checkpoint(BNB, blockwise("nf4", True))),
    "bitsandbytes FP4": ("bitsandbytes", write_checkpoint(BNB, blockwise("fp4", False))),
    "LLM.int8": ("bitsandbytes", write_checkpoint({"quant_method": "bitsandbytes", "load_in_8bit": True}, vectorwise)),
    "ModelOpt FP8": ("modelopt", write_checkpoint({"quant_method": "modelopt", "quant_algo": "FP8"}, modelopt("FP8"))),
    "ModelOpt NVFP4": (
        "modelopt", write_checkpoint({"quant_method": "modelopt", "quant_algo": "NVFP4"}, modelopt("NVFP4")),
    ),
    "MXFP4": (
        "compressed-tensors",
        write_checkpoint(
            scheme("mxfp4-pack-quantized", 4, "float"),
            compressed("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32),
        ),
    ),
}  # fmt: skip

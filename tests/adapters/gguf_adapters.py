"""Writes PEFT adapters as llama.cpp's convert_lora_to_gguf.py does, for a few architectures."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "attn.c_attn": "attn_qkv",
    "mlp.down_proj": "ffn_down", "attn.c_proj": "attn_output", "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down",
}  # fmt: skip


def permuted(value: np.ndarray, heads: int) -> np.ndarray:
    """The rows of q or k in llama.cpp's order, as LlamaModel.permute of its conversion computes them."""
    return value.reshape(heads, 2, value.shape[0] // heads // 2, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)


def write_adapter(
    path: Path, arch: str, alpha: float, tensors: dict[str, np.ndarray], kind: str = "F32", **said: Any
) -> Path:
    """Write a GGUF file with these tensors. said: metadata that replaces the defaults."""
    writer = gguf.GGUFWriter(path, said.pop("architecture", arch))
    writer.add_type(said.pop("type", "adapter"))
    writer.add_string("adapter.type", said.pop("adapter_type", "lora"))
    writer.add_float32("adapter.lora.alpha", alpha)
    if invocation := said.pop("invocation", None):
        writer.add_key_value("adapter.alora.invocation_tokens", invocation, gguf.GGUFValueType.ARRAY,
                             sub_type=gguf.GGUFValueType.UINT32)  # fmt: skip
    for key, value in said.items():
        writer.add_string(key, value)
    quantized = gguf.GGMLQuantizationType[kind]
    for name, value in tensors.items():
        raw = gguf.quants.quantize(np.ascontiguousarray(value, np.float32), quantized)
        writer.add_tensor(name, raw, raw_dtype=quantized)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def convert(adapter: Path, model: Path, path: Path, arch: str, kind: str = "F32", **said: Any) -> Path:
    """Convert a PEFT adapter to a GGUF file."""
    config = json.loads((model / "config.json").read_text())
    options = json.loads((adapter / "adapter_config.json").read_text())
    tensors: dict[str, np.ndarray] = {}
    for key, value in load_file(adapter / "adapter_model.safetensors").items():
        name = key.removeprefix("base_model.model.")
        if name.endswith(".base_layer.weight"):
            continue
        found = re.fullmatch(r"(.*?)\.lora_(embedding_)?([AB])(\.weight)?", name)
        assert found, name
        module, table, which, _ = found.groups()
        if table:
            ours = "token_embd"
            value = value.T if which == "A" else value
        elif module.endswith("lm_head"):
            ours = "output"
        else:
            layer = re.search(r"\.(\d+)\.", module)
            assert layer
            ours = f"blk.{layer[1]}.{next(n for end, n in NAMES.items() if module.endswith(end))}"
        heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(ours.rpartition(".")[2])
        if arch == "llama" and heads and which == "B":
            value = permuted(value, config[heads])
        tensors[f"{ours}.weight.lora_{which.lower()}"] = value
    return write_adapter(path, arch, options["lora_alpha"], tensors, kind, **said)


def convert_experts(adapter: Path, path: Path, arch: str, experts: int, left_out: str = "") -> Path:
    """Convert an adapter of experts (`target_parameters` gate_up_proj and down_proj); gate and up become two tensors.
    left_out: the one of gate, up and down that is not written, "" for none."""
    options = json.loads((adapter / "adapter_config.json").read_text())
    given, rank = load_file(adapter / "adapter_model.safetensors"), options["r"]
    tensors: dict[str, np.ndarray] = {}
    for key, a in given.items():
        if not key.endswith("lora_A.weight"):
            continue
        b, layer = given[key.replace("lora_A", "lora_B")], re.search(r"\.(\d+)\.", key)
        assert layer
        first = a.reshape(experts, rank, a.shape[1])
        second = b.reshape(b.shape[0], rank, experts).transpose(2, 0, 1)
        # the adapter of gate_up_proj, which PEFT wraps first, is the inner one
        gate_up = dict(zip(("gate", "up"), np.split(second, 2, axis=1), strict=True)) if ".base_layer." in key else {}
        for part, own in (gate_up or {"down": second}).items():
            if part == left_out:
                continue
            name = f"blk.{layer[1]}.ffn_{part}_exps.weight"
            tensors |= {f"{name}.lora_a": first, f"{name}.lora_b": own}
    return write_adapter(path, arch, options["lora_alpha"], tensors)

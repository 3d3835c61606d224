"""Writes models of transformers as GGUF files, with the writer and the quantizers of the `gguf` package, and gives the
models with the values of these files: `gguf.quants.dequantize` of every tensor, in transformers' layout.

Values are changed as llama.cpp's convert_hf_to_gguf.py changes them: the rows of a llama's Q and K are permuted,
gemma's norms are one larger, GPT-2's matrices are transposed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind

HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,), "MXFP4": (),
    "IQ1_S": (0,), "IQ1_M": (), "IQ2_XXS": (0,), "IQ2_XS": (0,), "IQ2_S": (0,), "IQ3_XXS": (0,), "IQ3_S": (0,),
    "TQ1_0": (52,), "TQ2_0": (64,), "NVFP4": (),
}  # fmt: skip
TYPICAL = {"Q2_K": 16, "Q3_K": 64, "Q4_K": 500, "Q5_K": 1000, "Q6_K": 2500, "IQ4_NL": 70, "IQ4_XS": 1300}
TYPICAL |= {
    "IQ1_S": 8,
    "IQ2_XXS": 100,
    "IQ2_XS": 100,
    "IQ2_S": 100,
    "IQ3_XXS": 150,
    "IQ3_S": 140,
    "TQ1_0": 1,
    "TQ2_0": 1,
}
Change = Callable[[np.ndarray], np.ndarray]


def random_blocks(kind: Kind, rows: int, k: int, rng: np.random.Generator, spread: float = 0.1) -> np.ndarray:
    """Valid blocks of any format, uint8 [rows, bytes]: random codes, with scales that give values of about `spread`."""
    size, nbytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (rows, k // size, nbytes), dtype=np.uint8)
    for at in HALVES[kind.name]:
        scale = spread / TYPICAL.get(kind.name, 16) * rng.uniform(0.5, 1.5, (*blocks.shape[:2], 1))
        sign = -8.0 if at == 2 and kind.name in ("Q4_1", "Q5_1") else 1.0
        blocks[:, :, at : at + 2] = (sign * scale).astype(np.float16).view(np.uint8)
    if kind == Kind.MXFP4:
        blocks[:, :, 0] = rng.integers(120, 124, blocks.shape[:2])
    if kind == Kind.NVFP4:
        blocks[:, :, :4] = rng.integers(8, 32, (*blocks.shape[:2], 4))
    if kind == Kind.TQ2_0:
        blocks[:, :, :64] &= (blocks[:, :, :64] << np.uint8(1)) | np.uint8(0x55)  # no 2-bit field is 3
        blocks[:, :, :64] &= ~((blocks[:, :, :64] & np.uint8(0x55)) << np.uint8(1))
    if kind == Kind.IQ1_M:  # a float16 of about 0.01 in the upper four bits of four words
        words = blocks[:, :, 48:].view(np.uint16)
        words[:] = words & np.uint16(0x0FFF) | np.array([0x1000, 0x2000, 0x1000, 0x2000], np.uint16)
    return blocks.reshape(rows, -1)


def stored(value: np.ndarray, kind: Kind, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """The bytes of a tensor in a type and their values; random blocks if the package has no quantizer for the type."""
    if kind == Kind.F32:
        return value, value
    if kind == Kind.BF16:
        raw = gguf.quants.quantize(value, kind)
        return raw, gguf.quants.dequantize(raw, kind)
    try:
        raw = gguf.quants.quantize(value, kind)
    except NotImplementedError:
        rows = int(np.prod(value.shape[:-1]))
        raw = random_blocks(kind, rows, value.shape[-1], rng, float(value.std())).reshape(*value.shape[:-1], -1)
    return raw, gguf.quants.dequantize(raw, kind)


def permuted(value: np.ndarray, heads: int) -> np.ndarray:
    """Rows of Q or K in llama.cpp's order: its conversion's LlamaModel.permute."""
    return value.reshape(heads, 2, value.shape[0] // heads // 2, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)


def restored(value: np.ndarray, heads: int) -> np.ndarray:
    """The inverse of `permuted`."""
    return value.reshape(heads, value.shape[0] // heads // 2, 2, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)


def _changes(arch: str, name: str, config: Any) -> tuple[Change, Change]:
    """The conversion's change of a tensor's values, and its inverse."""
    heads = {".attn_q.": "num_attention_heads", ".attn_k.": "num_key_value_heads"}
    for part, field in heads.items():
        if arch == "llama" and part in name:
            return partial(permuted, heads=getattr(config, field)), partial(restored, heads=getattr(config, field))
    if arch.startswith("gemma") and name.endswith("norm.weight"):
        return (lambda v: v + 1), (lambda v: v - 1)
    linear = ("attn_qkv.weight", "attn_output.weight", "ffn_up.weight", "ffn_down.weight")
    if arch == "gpt2" and name.endswith(linear):
        return np.transpose, np.transpose
    return (lambda v: v), (lambda v: v)


def _pieces(name: str, value: np.ndarray) -> dict[str, np.ndarray]:
    """The tensors of a parameter in llama.cpp, by name: gate and up of experts are two tensors."""
    if name.endswith("experts.gate_up_proj"):
        gate, up = np.split(value, 2, axis=1)
        return {"ffn_gate_exps.weight": gate, "ffn_up_exps.weight": up}
    return {"": value}


def write_model(
    model: Any, arch: str, path: Path, kind_of: Callable[[str], str], metadata: Callable[[Any], None] | None = None,
    seed: int = 0,
) -> Any:  # fmt: skip
    """Write `model` and set its parameters to the values of the file; returns the model.

    kind_of: the type of a tensor of two or more dimensions, by llama.cpp's name. metadata: adds keys to the writer;
    None: adds none.
    """
    rng, config = np.random.default_rng(seed), model.config
    number = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == arch)
    table = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, arch)
    _describe(writer, arch, config)
    if metadata is not None:
        metadata(writer)
    tied = config.tie_word_embeddings
    state = {n: p for n, p in model.state_dict().items() if not (tied and n == "lm_head.weight")}
    for name, parameter in state.items():
        suffix = next((s for s in (".weight", ".bias") if name.endswith(s)), "")
        pieces = []
        for own, piece in _pieces(name, parameter.detach().numpy()).items():
            layer = (name.split(".") * 3)[2]
            ours = (
                f"blk.{layer}.{own}"
                if own
                else (table.get_name(name.removesuffix(suffix)) or "") + (suffix or ".weight")
            )
            assert not ours.startswith("."), f"{name} has no name in {arch}"
            change, undo = _changes(arch, ours, config)
            changed = np.ascontiguousarray(change(piece))
            kind = Kind[kind_of(ours)] if changed.ndim > 1 and "ffn_gate_inp" not in ours else Kind.F32
            raw, value = stored(changed, kind, rng)
            writer.add_tensor(ours, raw, raw_dtype=kind)
            pieces.append(torch.from_numpy(np.array(undo(value.reshape(changed.shape)), np.float32)))
        parameter.data.copy_(torch.cat(pieces, 1) if len(pieces) > 1 else pieces[0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _describe(writer: Any, arch: str, config: Any) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    if arch == "gpt2":
        writer.add_feed_forward_length(config.n_inner or 4 * config.hidden_size)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
        return
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_dimension_count(head)
    rope = config.rope_parameters
    writer.add_rope_freq_base((rope.get("full_attention") or rope)["rope_theta"])
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if getattr(config, "num_experts", None):
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)

"""Writes a checkpoint of make_model.py as a GGUF file with every matrix in Q4_0, for llama.cpp to run.

    python benchmarks/make_gguf.py build/llama-1b build/llama-1b.gguf
    python benchmarks/make_gguf.py llama-1b build/llama-1b.Q4_K_M.gguf --random Q4_K_M    # of a shape: no checkpoint

The weights are random, so llama.cpp's permutation of Q and K rows does not matter. With --random nothing is quantized:
blocks are random bytes with scales that give values like a checkpoint's, which takes seconds for any type. The file has
the tokens of the checkpoint's tokenizer.json, if it exists: a byte-level BPE as serve/make_vocab.py writes it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from make_model import config as config_of
from make_model import tensors as tensors_of

NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def gguf_name(name: str) -> str:
    """The GGUF name of a weight: model.layers.3.mlp.up_proj.weight -> blk.3.ffn_up.weight."""
    if name.startswith("model.layers."):
        _, _, layer, rest = name.split(".", 3)
        return f"blk.{layer}.{NAMES[rest.removesuffix('.weight')]}.weight"
    return {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
            "lm_head.weight": "output.weight"}[name]  # fmt: skip


def read_tensors(file: Path) -> dict[str, np.ndarray]:
    """Tensors of a bf16 safetensors file as float32, by name, one mapped array each."""
    raw = np.memmap(file, np.uint8, "r")
    length = int(raw[:8].view(np.uint64)[0])
    header = json.loads(raw[8 : 8 + length].tobytes())
    header.pop("__metadata__", None)
    base = 8 + length
    return {
        name: raw[base + e["data_offsets"][0] : base + e["data_offsets"][1]].view(np.uint16).reshape(e["shape"])
        for name, e in header.items()
    }


def add_tokenizer(writer: gguf.GGUFWriter, file: Path) -> None:
    """Add tokens and merges; llama.cpp's "gpt-2" splits text as transformers' ByteLevel does."""
    if not file.exists():
        writer.add_tokenizer_model("no_vocab")
        return
    model = json.loads(file.read_text())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if i == 0 else gguf.TokenType.NORMAL for i in range(len(tokens))])
    writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)


Q = gguf.GGMLQuantizationType
# by type: the byte offsets of scales in a block, and scales that give values of about 0.02
SCALES = {
    Q.Q4_0: {0: np.float16(4e-3)}, Q.Q8_0: {0: np.float16(3e-4)}, Q.Q6_K: {208: np.float16(2e-5)},
    Q.Q4_K: {0: np.float16(1.2e-4), 2: np.float16(9e-4)}, Q.MXFP4: {0: np.uint8(127 - 7)},
}  # fmt: skip


def type_of(recipe: str, name: str, layers: int) -> gguf.GGMLQuantizationType:
    """The type that llama-quantize gives a matrix (llama_tensor_get_type, for the Llama family)."""
    if recipe != "Q4_K_M":
        return Q[recipe]
    if name in ("token_embd.weight", "output.weight"):
        return Q.Q6_K
    layer = int(name.split(".")[1])
    eighth = layers // 8
    more = layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2
    return Q.Q6_K if more and ("attn_v" in name or "ffn_down" in name) else Q.Q4_K


def random_blocks(kind: gguf.GGMLQuantizationType, rows: int, k: int, seed: int) -> np.ndarray:
    """Random codes with plausible scales, uint8 [rows, bytes of a row]."""
    size, nbytes = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(seed)
    blocks = np.frombuffer(rng.bytes(rows * k // size * nbytes), np.uint8).reshape(-1, nbytes).copy()
    for at, scale in SCALES[kind].items():
        blocks[:, at : at + scale.nbytes] = np.frombuffer(scale.tobytes(), np.uint8)
    return blocks.reshape(rows, -1)


def random_tensors(shape: str, recipe: str, writer: gguf.GGUFWriter) -> None:
    """Add every tensor of a shape, matrices as random blocks."""
    layers = int(str(config_of(shape)["num_hidden_layers"]))
    for i, (name, size) in enumerate(tensors_of(shape)):
        name = gguf_name(name)
        if len(size) == 1:
            writer.add_tensor(name, np.ones(size, np.float32))
            continue
        kind = type_of(recipe, name, layers)
        writer.add_tensor(name, random_blocks(kind, size[0], size[1], i), raw_dtype=kind)


def write(model: str, out: Path, recipe: str | None = None, kind: gguf.GGMLQuantizationType = Q.Q4_0) -> None:
    """Quantize a checkpoint to `kind` and write it; with a recipe, `model` is a shape and blocks are random."""
    folder = Path(model)
    config: dict[str, Any] = config_of(model) if recipe else json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(out, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_vocab_size(config["vocab_size"])
    add_tokenizer(writer, folder / "tokenizer.json")
    if recipe:
        random_tensors(model, recipe, writer)
    for name, bits in {} if recipe else read_tensors(folder / "model.safetensors").items():
        value = (bits.astype(np.uint32) << 16).view(np.float32)
        if value.ndim == 2:
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(value, kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name(name), value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a checkpoint's folder; with --random, the name of a shape of make_model.py")
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--random", choices=["Q4_0", "Q8_0", "Q4_K_M"], metavar="TYPE", help="random blocks of this type"
    )
    arguments = parser.parse_args()
    write(arguments.model, arguments.out, arguments.random)

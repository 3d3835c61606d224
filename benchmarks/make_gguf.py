"""Writes a checkpoint of make_model.py as a GGUF file with every matrix in Q4_0, for llama.cpp to run.

    python benchmarks/make_gguf.py build/llama-1b build/llama-1b.gguf

The weights are random, so llama.cpp's permutation of Q and K rows does not matter. The file has the checkpoint's
tokenizer.json, where there is one: a byte-level BPE as serve/make_vocab.py writes it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import gguf
import numpy as np

NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def gguf_name(name: str) -> str:
    """model.layers.3.mlp.up_proj.weight -> blk.3.ffn_up.weight."""
    if name.startswith("model.layers."):
        _, _, layer, rest = name.split(".", 3)
        return f"blk.{layer}.{NAMES[rest.removesuffix('.weight')]}.weight"
    return {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}[name]


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
    """Tokens and merges; llama.cpp's "gpt-2" splits text as transformers' ByteLevel does."""
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


def write(model: Path, out: Path) -> None:
    """Quantize and write."""
    config = json.loads((model / "config.json").read_text())
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
    add_tokenizer(writer, model / "tokenizer.json")
    q4 = gguf.GGMLQuantizationType.Q4_0
    for name, bits in read_tensors(model / "model.safetensors").items():
        value = (bits.astype(np.uint32) << 16).view(np.float32)
        if value.ndim == 2:
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(value, q4), raw_dtype=q4)
        else:
            writer.add_tensor(gguf_name(name), value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    write(arguments.model, arguments.out)

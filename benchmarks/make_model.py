"""Writes random-weight Llama checkpoints of well-known shapes for speed measurements, one tensor at a time.

python benchmarks/make_model.py llama-1b build/llama-1b
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

# hidden, layers, heads, KV heads, FFN, vocabulary, tied
SHAPES = {
    "llama-1b": (2048, 16, 32, 8, 8192, 128256, True),  # Llama-3.2-1B
    "llama-8b": (4096, 32, 32, 8, 14336, 128256, False),  # Llama-3.1-8B
    "llama-8b-quarter": (4096, 8, 32, 8, 14336, 128256, False),  # with 8 of its 32 layers
    "llama-70b-layer": (8192, 1, 64, 8, 28672, 32000, False),  # Llama-2-70B, with one of its 80 layers
    "smollm-135m": (576, 30, 9, 3, 1536, 49152, True),  # SmolLM2-135M
    "tiny": (256, 2, 4, 2, 512, 1024, True),
}


def config(shape: str) -> dict[str, object]:
    """The config.json of a Llama model of a shape in SHAPES."""
    hidden, layers, heads, kv_heads, ffn, vocab, tied = SHAPES[shape]
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads, "intermediate_size": ffn, "vocab_size": vocab, "tie_word_embeddings": tied,
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "hidden_act": "silu", "dtype": "bfloat16",
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "bos_token_id": 1, "eos_token_id": 2, "attention_bias": False, "mlp_bias": False,
    }  # fmt: skip


def tensors(shape: str) -> list[tuple[str, tuple[int, ...]]]:
    """The name and shape of each tensor, in file order."""
    hidden, layers, heads, kv_heads, ffn, vocab, tied = SHAPES[shape]
    kv = hidden // heads * kv_heads
    found: list[tuple[str, tuple[int, ...]]] = [("model.embed_tokens.weight", (vocab, hidden))]
    for i in range(layers):
        prefix = f"model.layers.{i}."
        found += [
            (prefix + "self_attn.q_proj.weight", (hidden, hidden)), (prefix + "self_attn.k_proj.weight", (kv, hidden)),
            (prefix + "self_attn.v_proj.weight", (kv, hidden)), (prefix + "self_attn.o_proj.weight", (hidden, hidden)),
            (prefix + "mlp.gate_proj.weight", (ffn, hidden)), (prefix + "mlp.up_proj.weight", (ffn, hidden)),
            (prefix + "mlp.down_proj.weight", (hidden, ffn)),
            (prefix + "input_layernorm.weight", (hidden,)), (prefix + "post_attention_layernorm.weight", (hidden,)),
        ]  # fmt: skip
    found.append(("model.norm.weight", (hidden,)))
    return found if tied else [*found, ("lm_head.weight", (vocab, hidden))]


def write(shape: str, out: Path, seed: int = 0, device: str = "cpu") -> None:
    """Write config.json and model.safetensors (bf16, normal with standard deviation 0.02; norms are ones).

    device: the torch device that draws the numbers; each device draws other numbers from a seed.
    """
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(config(shape), indent=1))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, size in tensors(shape):
        nbytes = 2 * torch.Size(size).numel()
        header[name] = {"dtype": "BF16", "shape": list(size), "data_offsets": [start, start + nbytes]}
        start += nbytes
    text = json.dumps(header).encode()
    generator = torch.Generator(device).manual_seed(seed)
    with (out / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, size in tensors(shape):
            value = torch.ones(size, device=device)
            if len(size) > 1:
                value.normal_(0, 0.02, generator=generator)
            file.write(value.to(torch.bfloat16).view(torch.uint8).cpu().numpy().data)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    write(arguments.shape, arguments.out)

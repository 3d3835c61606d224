"""Layers with a recurrent state, icc beside llama.cpp: decode at batch 1 and 8, and prefill, in interleaved rounds.

    python benchmarks/hybrid.py build/peers/bin/python build/hybrid [--threads 2] [--clock wall] [--rounds 3]

Layers as wide as those of the published models, few of them, of random weights: a checkpoint in bf16 that icc compiles
with `--quant rtn4` (groups of 128, of Qwen3-Next 32, and a head of 8 bits), and a GGUF file of random Q4_0 blocks with
a Q8_0 head. The values differ, the bytes do not by much (4.25 or 5 bits a weight, and 4.5). Experts: Qwen3-Next has
512, of which a token takes 10; here there are 16, of which it takes 10 too.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CPU = Path(__file__).with_name("cpu")
VOCAB, WIDTH = 8192, 2048
Rows = Iterator[tuple[str, tuple[int, ...]]]


@dataclass(frozen=True)
class Shape:
    """config: of transformers. arch, keys: of the GGUF file. group: of icc's codes."""

    kind: str
    config: dict[str, Any]
    arch: str
    keys: dict[str, int | list[int]] = field(default_factory=dict)
    group: int = 128

    def rows(self) -> Rows:
        """Tensors of the GGUF file and their shapes, rows first."""
        yield "token_embd.weight", (VOCAB, WIDTH)
        yield "token_embd_norm.weight" if self.arch == "lfm2" else "output_norm.weight", (WIDTH,)
        for layer in range(self.config["num_hidden_layers"]):
            yield from ((f"blk.{layer}.{name}", size) for name, size in LAYERS[self.arch](self, layer))


def mamba2(shape: Shape, layer: int) -> Rows:
    inner, groups, heads = 2 * WIDTH, 2 * 128, 64
    yield "attn_norm.weight", (WIDTH,)
    yield "ssm_in.weight", (2 * inner + groups + heads, WIDTH)
    yield "ssm_conv1d.weight", (inner + groups, 4, 0)
    yield "ssm_conv1d.bias", (inner + groups,)
    yield "ssm_dt.bias", (heads,)
    yield "ssm_a", (heads, 1, 0)
    yield "ssm_d", (heads, 1, 0)
    yield "ssm_norm.weight", (1, inner, 0)
    yield "ssm_out.weight", (WIDTH, inner)


def lfm2(shape: Shape, layer: int) -> Rows:
    yield "attn_norm.weight", (WIDTH,)
    yield "ffn_norm.weight", (WIDTH,)
    for name in ("gate", "up"):
        yield f"ffn_{name}.weight", (8192, WIDTH)
    yield "ffn_down.weight", (WIDTH, 8192)
    if shape.config["layer_types"][layer] == "conv":
        yield "shortconv.conv.weight", (WIDTH, 3, 0)
        yield "shortconv.in_proj.weight", (3 * WIDTH, WIDTH)
        yield "shortconv.out_proj.weight", (WIDTH, WIDTH)
        return
    yield "attn_q_norm.weight", (64,)
    yield "attn_k_norm.weight", (64,)
    for name, size in (("q", WIDTH), ("k", 512), ("v", 512), ("output", WIDTH)):
        yield f"attn_{name}.weight", (size, WIDTH)


def qwen3next(shape: Shape, layer: int) -> Rows:
    yield "attn_norm.weight", (WIDTH,)
    yield "post_attention_norm.weight", (WIDTH,)
    if shape.config["layer_types"][layer] == "full_attention":
        yield "attn_q_norm.weight", (256,)
        yield "attn_k_norm.weight", (256,)
        for name, size in (("q", 8192), ("k", 512), ("v", 512)):
            yield f"attn_{name}.weight", (size, WIDTH)
        yield "attn_output.weight", (WIDTH, 4096)
    else:
        yield "attn_qkv.weight", (8192, WIDTH)
        yield "attn_gate.weight", (4096, WIDTH)
        yield "ssm_conv1d.weight", (8192, 4, 0)
        yield "ssm_dt.bias", (32,)
        yield "ssm_a", (32,)
        yield "ssm_ba.weight", (64, WIDTH)
        yield "ssm_norm.weight", (128,)
        yield "ssm_out.weight", (WIDTH, 4096)
    yield "ffn_gate_inp.weight", (EXPERTS, WIDTH, 0)
    yield "ffn_gate_inp_shexp.weight", (WIDTH,)
    for name in ("gate", "up"):
        yield f"ffn_{name}_exps.weight", (EXPERTS, 512, WIDTH)
        yield f"ffn_{name}_shexp.weight", (512, WIDTH)
    yield "ffn_down_exps.weight", (EXPERTS, WIDTH, 512)
    yield "ffn_down_shexp.weight", (WIDTH, 512)


LAYERS = {"mamba2": mamba2, "lfm2": lfm2, "qwen3next": qwen3next}
EXPERTS = 16
COMMON = {"vocab_size": VOCAB, "hidden_size": WIDTH, "tie_word_embeddings": True, "max_position_embeddings": 4096}
_SSM = {"ssm.conv_kernel": 4, "ssm.inner_size": 4096, "ssm.state_size": 128}
SHAPES = {
    "mamba2": Shape(
        "mamba2",
        {**COMMON, "num_heads": 64, "head_dim": 64, "state_size": 128, "n_groups": 1, "num_hidden_layers": 6},
        "mamba2",
        {**_SSM, "ssm.time_step_rank": 64, "ssm.group_count": 1, "feed_forward_length": 0, "attention.head_count": 0},
    ),
    "lfm2": Shape(
        "lfm2",
        {
            **COMMON, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8,
            "block_auto_adjust_ff_dim": False, "num_hidden_layers": 4,
            "layer_types": ["conv", "conv", "full_attention", "conv"],
        },
        "lfm2",
        {
            "feed_forward_length": 8192, "attention.head_count": 32, "attention.head_count_kv": [0, 0, 8, 0],
            "shortconv.l_cache": 3,
        },
    ),
    "qwen3next": Shape(
        "qwen3_next",
        {
            **COMMON, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "num_experts": EXPERTS,
            "num_experts_per_tok": 10, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
            "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
            "linear_value_head_dim": 128, "num_hidden_layers": 4,
            "layer_types": [*["linear_attention"] * 3, "full_attention"],
        },
        "qwen3next",
        {
            **_SSM, "ssm.time_step_rank": 32, "ssm.group_count": 16, "attention.head_count": 16,
            "attention.head_count_kv": 2, "attention.key_length": 256, "attention.value_length": 256,
            "feed_forward_length": 512, "expert_count": EXPERTS, "expert_used_count": 10,
            "expert_feed_forward_length": 512, "expert_shared_feed_forward_length": 512, "rope.dimension_count": 64,
        },
        group=32,
    ),
}  # fmt: skip


def write_gguf(shape: Shape, out: Path) -> None:
    """A size that ends in 0 is of float32, as llama.cpp keeps such tensors; as are vectors."""
    import gguf
    import numpy as np
    from make_gguf import random_blocks

    writer = gguf.GGUFWriter(out, shape.arch)
    writer.add_block_count(shape.config["num_hidden_layers"])
    writer.add_context_length(4096)
    writer.add_embedding_length(WIDTH)
    writer.add_vocab_size(VOCAB)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e6)
    writer.add_tokenizer_model("no_vocab")
    for name, value in shape.keys.items():
        key = f"{shape.arch}.{name}"
        writer.add_array(key, value) if isinstance(value, list) else writer.add_uint32(key, value)
    kinds, rng = gguf.GGMLQuantizationType, np.random.default_rng(0)
    for number, (name, size) in enumerate(shape.rows()):
        if size[-1] == 0 or len(size) == 1:
            values = rng.uniform(0.02, 0.2, size[:-1] if size[-1] == 0 else size).astype(np.float32)
            writer.add_tensor(name, -values if name.endswith("ssm_a") else values)
            continue
        kind = kinds.Q8_0 if name == "token_embd.weight" else kinds.Q4_0
        *lead, rows, k = size
        blocks = random_blocks(kind, int(np.prod([*lead, rows])), k, number)
        writer.add_tensor(name, blocks.reshape(*lead, rows, -1), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_checkpoint(shape: Shape, folder: Path) -> None:
    """transformers' own initialization."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(shape.kind, **shape.config)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


def prepare(name: str, folder: Path) -> str:
    """FILE.gguf=ENGINE, made if they are not there."""
    import icc

    shape, file, engine = SHAPES[name], folder / f"{name}.gguf", folder / f"{name}.engine"
    if not file.exists():
        write_gguf(shape, file)
    if not engine.exists():
        if not (folder / name).exists():
            write_checkpoint(shape, folder / name)
        sizes = {"group_size": shape.group, "max_seq_len": 2048, "max_batch_size": 8}
        icc.compile(folder / name, engine, target="native", quant="rtn4", **sizes)
    return f"{file}={engine}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python", help="of the environment that has llama-cpp-python")
    parser.add_argument("folder", type=Path, help="where checkpoints, files and engines are, or are made")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prefill", type=int, default=512)
    parser.add_argument("--steps", type=int, default=24)
    a = parser.parse_args()
    os.environ["BENCH_CLOCK"] = a.clock
    a.folder.mkdir(exist_ok=True)
    pairs = [prepare(name, a.folder) for name in a.shapes.split(",")]
    print("| file | row | icc tok/s | llama.cpp tok/s | ratio (range) |\n|---|---|---|---|---|", flush=True)
    sys.path.append(str(CPU))  # behind the package gguf
    spec = importlib.util.spec_from_file_location("gguf_rows", CPU / "gguf.py")
    assert spec is not None and spec.loader is not None
    cpu = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(cpu)
    cpu.compare(a.python, pairs, a.threads, a.rounds, cpu.rows(a.prefill, a.steps))


if __name__ == "__main__":
    main()

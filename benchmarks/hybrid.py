"""Layers with a recurrent state or with experts, icc beside llama.cpp: decode at batch 1 and 8, prefill, interleaved.

    python benchmarks/hybrid.py build/peers/bin/python build/hybrid [--threads 2] [--clock wall] [--rounds 3]

A few layers with the published models' widths and random weights: a bf16 checkpoint that icc compiles with `--quant
rtn4` (groups of 128, for Qwen3-Next 32, and an 8-bit head), and a GGUF file of random Q4_0 blocks with a Q8_0 head. The
values differ; the sizes are similar (4.25 or 5 bits a weight, and 4.5). Qwen3-Next has 512 experts, of which a token
uses 10; here there are 16, of which it also uses 10. Layers of Qwen3-30B-A3B (Q4_0) and of gpt-oss-20b (experts in
MXFP4, the rest in Q8_0) have all of their experts, and icc compiles the same file.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

from hybrid_shapes import SHAPES, VOCAB, Shape

CPU = Path(__file__).with_name("cpu")


def write_gguf(shape: Shape, out: Path) -> None:
    """Write a GGUF file of random blocks. Vectors, and tensors whose size in `shape.rows()` ends in 0, are float32, as
    llama.cpp keeps them."""
    import gguf
    import numpy as np
    from make_gguf import random_blocks

    writer = gguf.GGUFWriter(out, shape.arch)
    writer.add_block_count(shape.config["num_hidden_layers"])
    writer.add_context_length(4096)
    writer.add_embedding_length(shape.width)
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
            values -= 0.11 * name.endswith("ffn_gate_inp.weight")  # so that tokens choose different experts
            writer.add_tensor(name, -values if name.endswith("ssm_a") else values)
            continue
        kind = kinds[next((kind for end, kind in shape.blocks.items() if name.endswith(end)), "Q4_0")]
        kind = kinds.Q8_0 if name == "token_embd.weight" else kind
        *lead, rows, k = size
        blocks = random_blocks(kind, int(np.prod([*lead, rows])), k, number)
        writer.add_tensor(name, blocks.reshape(*lead, rows, -1), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_checkpoint(shape: Shape, folder: Path) -> None:
    """Write a bf16 checkpoint with transformers' own initialization."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(shape.kind, **shape.config)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


def prepare(name: str, folder: Path) -> str:
    """FILE.gguf=ENGINE for cpu/gguf.py; missing files are made."""
    import icc

    shape, file, engine = SHAPES[name], folder / f"{name}.gguf", folder / f"{name}.engine"
    if not file.exists():
        write_gguf(shape, file)
    if not engine.exists():
        sizes: dict[str, Any] = {"target": "native", "max_seq_len": 2048, "max_batch_size": 8}
        if not shape.group:
            icc.compile(file, engine, **sizes)
            return f"{file}={engine}"
        if not (folder / name).exists():
            write_checkpoint(shape, folder / name)
        icc.compile(folder / name, engine, quant="rtn4", group_size=shape.group, **sizes)
    return f"{file}={engine}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python", help="the Python of the environment that has llama-cpp-python")
    parser.add_argument("folder", type=Path, help="folder of checkpoints, files and engines; missing ones are made")
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
    sys.path.append(str(CPU))  # after the package gguf
    spec = importlib.util.spec_from_file_location("gguf_rows", CPU / "gguf.py")
    assert spec is not None and spec.loader is not None
    cpu = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(cpu)
    cpu.compare(a.python, pairs, a.threads, a.rounds, cpu.rows(a.prefill, a.steps))


if __name__ == "__main__":
    main()

"""Peak memory of a compile for every reader of quantized checkpoints, against 1.5 x the file + 1 GB.

    python benchmarks/reader_memory.py [FORMAT ...] [--folder build] [--scale 1.0] [--out FILE.md]

A Llama of random codes is written in the layout of each format, one tensor at a time (the values do not matter here),
compiled for this machine with one kernel variant, measured (`compile_memory.py`) and deleted.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

HIDDEN, FFN, HEADS, KV_HEADS, LAYERS, VOCAB = 2048, 8192, 32, 8, 16, 32000
Tensors = dict[str, torch.Tensor]
Writer = Callable[[int, int], Tensors]


def _words(*shape: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32)


def _bytes(*shape: int, top: int = 256) -> torch.Tensor:
    return torch.randint(0, top, shape, dtype=torch.uint8)


def _float8(*shape: int) -> torch.Tensor:
    return _bytes(*shape, top=0x70).view(torch.float8_e4m3fn)


def _scales(*shape: int, kind: torch.dtype = torch.float16) -> torch.Tensor:
    return (torch.rand(shape) * 1e-3 + 1e-3).to(kind)


def gptq(n: int, k: int, bits: int = 4, sorted_groups: bool = True) -> Tensors:
    groups = torch.arange(k) // 128
    return {
        "qweight": _words(k * bits // 32, n), "qzeros": _words(k // 128, n * bits // 32),
        "scales": _scales(k // 128, n),
        "g_idx": (groups if sorted_groups else groups[torch.randperm(k)]).to(torch.int32),
    }  # fmt: skip


def awq(n: int, k: int) -> Tensors:
    return {"qweight": _words(k, n // 8), "qzeros": _words(k // 128, n // 8), "scales": _scales(k // 128, n)}


def compressed(n: int, k: int, bits: int = 4) -> Tensors:
    return {
        "weight_packed": _words(n, k * bits // 32), "weight_scale": _scales(n, k // 128, kind=torch.bfloat16),
        "weight_shape": torch.tensor([n, k]),
    }  # fmt: skip


def compressed_int8(n: int, k: int) -> Tensors:
    return {"weight": _bytes(n, k).view(torch.int8), "weight_scale": _scales(n, 1, kind=torch.bfloat16)}


def compressed_float8(n: int, k: int) -> Tensors:
    return {"weight": _float8(n, k), "weight_scale": _scales(n, 1, kind=torch.bfloat16)}


def fp8_blocks(n: int, k: int) -> Tensors:
    return {"weight": _float8(n, k), "weight_scale_inv": _scales(n // 128, k // 128, kind=torch.float32)}


def modelopt_fp8(n: int, k: int) -> Tensors:
    return {"weight": _float8(n, k), "weight_scale": torch.tensor(1e-3), "input_scale": torch.tensor(1.0)}


def modelopt_nvfp4(n: int, k: int) -> Tensors:
    return {
        "weight": _bytes(n, k // 2), "weight_scale": _float8(n, k // 16), "weight_scale_2": torch.tensor(1e-3),
        "input_scale": torch.tensor(1.0),
    }  # fmt: skip


def nf4(n: int, k: int) -> Tensors:
    facts = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [n, k]}
    return {
        "weight": _bytes(n * k // 2, 1), "weight.absmax": _scales(n * k // 64, kind=torch.float32),
        "weight.quant_map": torch.tensor(_NF4),
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(facts).encode()), dtype=torch.uint8),
    }  # fmt: skip


def llm_int8(n: int, k: int) -> Tensors:
    return {"weight": _bytes(n, k).view(torch.int8), "SCB": _scales(n, kind=torch.float32)}


_NF4 = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
]  # fmt: skip


def _groups(weights: dict[str, Any], form: str, **more: Any) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed",
            "ignore": ["lm_head"],
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, **more}}}  # fmt: skip


FORMATS: dict[str, tuple[Writer, dict[str, Any]]] = {
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}),
    "gptq-act-order": (lambda n, k: gptq(n, k, sorted_groups=False),
                       {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True}),
    "gptq-8": (lambda n, k: gptq(n, k, 8), {"quant_method": "gptq", "bits": 8, "group_size": 128, "desc_act": False}),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}),
    "compressed-w4a16": (compressed, _groups({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128,
                                              "symmetric": True}, "pack-quantized")),
    "compressed-w8a8": (compressed_int8, _groups({"num_bits": 8, "type": "int", "strategy": "channel",
                                                  "symmetric": True}, "int-quantized")),
    "compressed-fp8": (compressed_float8, _groups({"num_bits": 8, "type": "float", "strategy": "channel",
                                                   "symmetric": True}, "float-quantized")),
    "fp8-blocks": (fp8_blocks, {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}),
    "modelopt-fp8": (modelopt_fp8, {"quant_method": "modelopt", "quant_algo": "FP8"}),
    "modelopt-nvfp4": (modelopt_nvfp4, {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}),
    "bitsandbytes-nf4": (nf4, {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
                               "bnb_4bit_compute_dtype": "bfloat16"}),
    "bitsandbytes-int8": (llm_int8, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
}  # fmt: skip
# gpt-oss: experts of 4-bit floats, a whole layer of them in one tensor
OSS = {"hidden_size": 1024, "intermediate_size": 1024, "num_hidden_layers": 12, "num_local_experts": 32}


def llama(writer: Writer, layers: int) -> Iterator[Tensors]:
    """Yield the tensors, one layer at a time, the embedding first."""
    kv = HIDDEN // HEADS * KV_HEADS
    normal = (torch.randn(VOCAB, HIDDEN) * 0.02).to(torch.bfloat16)
    yield {"model.embed_tokens.weight": normal, "lm_head.weight": normal.clone(),
           "model.norm.weight": torch.ones(HIDDEN, dtype=torch.bfloat16)}  # fmt: skip
    sizes = {
        "self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (kv, HIDDEN), "self_attn.v_proj": (kv, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN), "mlp.gate_proj": (FFN, HIDDEN), "mlp.up_proj": (FFN, HIDDEN),
        "mlp.down_proj": (HIDDEN, FFN),
    }  # fmt: skip
    for layer in range(layers):
        lead = f"model.layers.{layer}."
        found = {
            f"{lead}{name}.{part}": value for name, (n, k) in sizes.items() for part, value in writer(n, k).items()
        }
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found[f"{lead}{norm}.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
        yield found


def oss() -> Iterator[Tensors]:
    """Yield the tensors of a gpt-oss with MXFP4 experts."""
    h, i, experts = OSS["hidden_size"], OSS["intermediate_size"], OSS["num_local_experts"]
    half = torch.bfloat16
    yield {"model.embed_tokens.weight": torch.randn(VOCAB, h).to(half), "model.norm.weight": torch.ones(h, dtype=half),
           "lm_head.weight": torch.randn(VOCAB, h).to(half)}  # fmt: skip
    for layer in range(OSS["num_hidden_layers"]):
        lead, found = f"model.layers.{layer}.", {}
        for name, n, k in (("q", 1024, h), ("k", 128, h), ("v", 128, h), ("o", h, 1024)):
            found |= {f"{lead}self_attn.{name}_proj.weight": (torch.randn(n, k) * 0.02).to(half),
                      f"{lead}self_attn.{name}_proj.bias": torch.zeros(n, dtype=half)}  # fmt: skip
        found |= {f"{lead}self_attn.sinks": torch.zeros(16, dtype=half),
                  f"{lead}mlp.router.weight": (torch.randn(experts, h) * 0.02).to(half),
                  f"{lead}mlp.router.bias": torch.zeros(experts, dtype=half)}  # fmt: skip
        for name, n, k in (("gate_up_proj", 2 * i, h), ("down_proj", h, i)):
            stem = f"{lead}mlp.experts.{name}"
            found |= {f"{stem}_blocks": _bytes(experts, n, k // 32, 16),
                      f"{stem}_scales": _bytes(experts, n, k // 32, top=8) + 115,
                      f"{stem}_bias": torch.zeros(experts, n, dtype=half)}  # fmt: skip
        found |= {f"{lead}{norm}.weight": torch.ones(h, dtype=half)
                  for norm in ("input_layernorm", "post_attention_layernorm")}  # fmt: skip
        yield found


def write(name: str, out: Path, layers: int) -> int:
    """Write the checkpoint of a format; its size in bytes."""
    out.mkdir(parents=True)
    base = {"vocab_size": VOCAB, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "dtype": "bfloat16",
            "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
    if name == "mxfp4":
        config = {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", **base, **OSS, "head_dim": 64,
                  "num_attention_heads": 16, "num_key_value_heads": 2, "num_experts_per_tok": 4, "sliding_window": 128,
                  "quantization_config": {"quant_method": "mxfp4"}}  # fmt: skip
        parts = oss()
    else:
        writer, facts = FORMATS[name]
        config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **base, "hidden_size": HIDDEN,
                  "intermediate_size": FFN, "num_hidden_layers": layers, "num_attention_heads": HEADS,
                  "num_key_value_heads": KV_HEADS, "head_dim": HIDDEN // HEADS,
                  "quantization_config": facts}  # fmt: skip
        parts = llama(writer, layers)
    (out / "config.json").write_text(json.dumps(config))
    index: dict[str, str] = {}
    for number, tensors in enumerate(parts):
        file = f"model-{number:05}.safetensors"
        save_file(tensors, out / file, {"format": "pt"})
        index |= dict.fromkeys(tensors, file)
    (out / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return sum(file.stat().st_size for file in out.glob("*.safetensors"))


def main() -> None:
    """Write, compile, measure and delete each format's checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("formats", nargs="*", default=[])
    parser.add_argument("--folder", type=Path, default=Path("build"))
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--out", type=Path)
    a = parser.parse_args()
    rows = ["| format | file | peak of the compile | bound | within | seconds |", "|---|---|---|---|---|---|"]
    for name in a.formats or [*FORMATS, "mxfp4"]:
        checkpoint = a.folder / f"memory-{name}"
        try:
            size = write(name, checkpoint, a.layers)
            done = subprocess.run(
                [sys.executable, str(Path(__file__).with_name("compile_memory.py")), str(checkpoint), "--",
                 "--target", "native", "--max-seq-len", "512"],
                capture_output=True, text=True,
            )  # fmt: skip
        finally:
            shutil.rmtree(checkpoint, ignore_errors=True)
        last = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else ""
        if not last.startswith("exit 0"):
            rows.append(
                f"| {name} | {size / 1e9:.2f} GB | failed: {(done.stderr or done.stdout).strip()[-200:]} | | | |"
            )
        else:
            seconds, peak = float(last.split()[2]), float(last.split()[-2])
            bound = 1.5 * size / 1e9 + 1
            verdict = "yes" if peak < bound else "**no**"
            rows.append(
                f"| {name} | {size / 1e9:.2f} GB | {peak:.2f} GB | {bound:.2f} GB | {verdict} | {seconds:.0f} |"
            )
        print(rows[-1], flush=True)
        if a.out is not None:
            a.out.write_text("\n".join(rows) + "\n")


if __name__ == "__main__":
    main()

"""The loss of `--state-cache bf16` on a trained model: the sample with recurrent layers in place of most attention.

    python benchmarks/state_precision.py OUT [--kind bamba|qwen3_5_text] [--seconds 240] [--windows 12]

The sample's embedding, MLPs, norms and, if the shapes are equal, attention are kept; four of six layers get a state
(Mamba 2, or the gated delta rule), and these are trained for --seconds of CPU time on the sample's text. Then engines
with states in float32 and bf16 score the held-out text in windows of 1,024 tokens, so that states must remember.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SAMPLE = ROOT / "samples" / "pystd"
WINDOW, ROWS, TOKENS = 1024, 4, 256
COMMON = {
    "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "tie_word_embeddings": True, "max_position_embeddings": 2048,
    "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None, "rms_norm_eps": 1e-6,
}  # fmt: skip
_LAYERS = ["linear_attention", "linear_attention", "full_attention"] * 2
KINDS: dict[str, dict[str, Any]] = {
    "bamba": {
        "attn_layer_indices": [2, 5], "mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_state": 64, "mamba_n_groups": 1,
        "mamba_expand": 2, "mamba_chunk_size": 64, "partial_rotary_factor": 1.0,
    },
    "qwen3_5_text": {
        "layer_types": _LAYERS, "linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
    },
}  # fmt: skip


NAMES = {"feed_forward": "mlp", "pre_ff_layernorm": "post_attention_layernorm", "final_layernorm": "norm"}


def begun(kind: str) -> Any:
    """The model to train, with all of the sample's weights that fit; zero-centred norms keep their own."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **COMMON, **KINDS[kind])).float()
    sample = load_file(SAMPLE / "model.safetensors")
    for name, parameter in model.named_parameters():
        source = ".".join(NAMES.get(part, part) for part in name.split("."))
        if name.endswith("dt_bias"):  # time steps of 0.001 to 0.1, as in the papers; transformers' 1 forgets at once
            steps = torch.exp(torch.rand_like(parameter) * math.log(100.0) + math.log(0.001))
            parameter.data.copy_(steps + torch.log(-torch.expm1(-steps)))
        elif source in sample and sample[source].shape == parameter.shape and ("norm" not in name or kind == "bamba"):
            parameter.data.copy_(sample[source])
            parameter.requires_grad_(parameter.dim() == 1 or "self_attn" in name)
    if kind == "qwen3_5_text":
        _attention_as_states(model, sample)
    print(f"{kind}: {sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters", flush=True)
    return model


def _attention_as_states(model: Any, sample: Any) -> None:
    """Initialize queries, keys and values of delta rules, and of gated attention, from the sample's attention, and
    convolutions as the identity."""
    import torch

    for number, layer in enumerate(model.model.layers):
        q, k, v, o = (sample[f"model.layers.{number}.self_attn.{n}_proj.weight"].float() for n in "qkvo")
        normed = sample[f"model.layers.{number}.input_layernorm.weight"].float()
        layer.input_layernorm.weight.data.copy_(normed - 1)
        layer.post_attention_layernorm.weight.data.copy_(
            sample[f"model.layers.{number}.post_attention_layernorm.weight"].float() - 1
        )
        if hasattr(layer, "linear_attn"):
            k, v = (w.view(2, 64, -1).repeat_interleave(2, 0).reshape(256, -1) for w in (k, v))
            layer.linear_attn.in_proj_qkv.weight.data.copy_(torch.cat([q, k, v]))
            layer.linear_attn.out_proj.weight.data.copy_(o)
            layer.linear_attn.conv1d.weight.data.mul_(0.1)[..., -1] += 1
        else:
            gated = layer.self_attn.q_proj.weight.data.view(4, 2, 64, -1)
            gated[:, 0], gated[:, 1] = q.view(4, 64, -1), 0.0
            layer.self_attn.o_proj.weight.data.copy_(2 * o)
    model.model.norm.weight.data.copy_(sample["model.norm.weight"].float() - 1)


def train(model: Any, seconds: float) -> None:
    """Train by AdamW for `seconds` of CPU time; of the sample's weights only those that `begun` left trainable."""
    import torch

    sys.path.insert(0, str(SAMPLE.parent))
    from pystd_corpus import STDLIB  # type: ignore[import-not-found]

    held = {name.removesuffix(".py.txt").replace(".", "/") + ".py" for name in os.listdir(SAMPLE / "heldout")}
    found = sorted([*STDLIB.glob("*.py"), *STDLIB.glob("[a-l]*/*.py")])
    files = [file for file in found if file.relative_to(STDLIB).as_posix() not in held]
    rows = batches(files)
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=3e-3, weight_decay=0.01, betas=(0.9, 0.95)
    )
    start, step, losses = time.process_time(), 0, []
    while (spent := time.process_time() - start) < seconds:
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min((step + 1) / 20, 1.0) * max(1.0 - spent / seconds, 0.02)
        ids = next(rows)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        step += 1
        if step % 20 == 0:
            print(f"step {step}, {spent:.0f} s: loss {sum(losses[-20:]) / 20:.3f}", flush=True)


def batches(files: list[Path]) -> Iterator[Any]:
    """Yield token ids [8, 256]: shuffled windows of concatenated random files."""
    import torch
    from tokenizers import Tokenizer

    tokenizer, waiting, rng = Tokenizer.from_file(str(SAMPLE / "tokenizer.json")), [], random.Random(0)
    while True:
        while len(waiting) < 40 * ROWS * TOKENS:
            waiting += tokenizer.encode(rng.choice(files).read_text(errors="ignore")).ids
        starts = rng.sample(range(len(waiting) // TOKENS), 20 * ROWS)
        for at in range(0, len(starts), ROWS):
            yield torch.tensor([waiting[i * TOKENS : (i + 1) * TOKENS] for i in starts[at : at + ROWS]])
        waiting = []


def main() -> None:
    """Train, compile with both kinds of states, print both perplexities."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--kind", choices=list(KINDS), default="bamba")
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--windows", type=int, default=12)
    a = parser.parse_args()
    import icc
    import numpy as np
    import torch
    from tokenizers import Tokenizer

    torch.set_num_threads(1)
    folder = a.out / a.kind
    if not (folder / "config.json").exists():
        model = begun(a.kind)
        train(model, a.seconds)
        model.save_pretrained(folder)
    tokenizer = Tokenizer.from_file(str(SAMPLE / "tokenizer.json"))
    text = "\n".join(file.read_text() for file in sorted((SAMPLE / "heldout").glob("*.txt")))
    ids = tokenizer.encode(text).ids
    starts = range(0, min(a.windows * WINDOW, len(ids) - WINDOW), WINDOW)
    found: dict[str, np.ndarray] = {}
    for kept in ("f32", "bf16"):
        engine = a.out / f"{a.kind}.{kept}.engine"
        if not engine.exists():
            icc.compile(folder, engine, target="native", state_cache=kept, max_seq_len=WINDOW, max_batch_size=1)
        with icc.load(engine, threads=1) as llm:
            found[kept] = np.concatenate(
                [losses(llm.logits(ids[at : at + WINDOW]), ids[at : at + WINDOW]) for at in starts]
            )
    base = found["f32"]
    for kept, lost in found.items():
        said = {"perplexity": float(np.exp(lost.mean())), "rise": float(np.expm1((lost - base).mean()))}
        late = np.concatenate([row[WINDOW // 2 :] for row in (lost - base).reshape(-1, WINDOW - 1)])
        more = {"rise_behind_512": float(np.expm1(late.mean())), "most_of_a_token": float(np.abs(lost - base).max())}
        print(json.dumps({"kind": a.kind, "states": kept, "tokens": len(lost), **said, **more}))


def losses(logits: Any, ids: list[int]) -> Any:
    """The negative log-likelihood of every token except the first, in nats, float64 [tokens - 1]."""
    import numpy as np

    shifted = logits[:-1].astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    return np.log(np.exp(shifted).sum(axis=1)) - shifted[np.arange(len(ids) - 1), ids[1:]]


if __name__ == "__main__":
    main()

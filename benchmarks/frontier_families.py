"""`--quant auto` beside uniform formats at equal bytes, on tiny models of several families that it trains itself.

    python benchmarks/frontier_families.py --out benchmarks/results/frontier_families.md

Each model (two layers of width 128, the sample's tokenizer) is trained for some hundred steps on four fifths of the
bundled text. The reference interpreter runs the stored weights on the last fifth, which neither training nor
calibration reads. Bytes are those of a CPU engine. Exit code 1 if a uniform method is better than auto.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from math import exp
from pathlib import Path

import torch
from icc.compiler.backends.base import Backend
from icc.compiler.backends.registry import backend_for
from icc.compiler.calibration import DEFAULT_TEXT, read_text, tokenize
from icc.compiler.frontend.load import load_graph
from icc.compiler.graph.graph import Graph
from icc.compiler.graph.together import logits_of
from icc.compiler.options import CompileOptions
from icc.compiler.program.lower import LowerOptions, lower
from icc.compiler.sizing import auto_passes
from icc.compiler.targets import TARGETS
from icc.passes import pipelines
from icc.passes.base import Pass, PassContext
from icc.passes.manager import run_passes
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

SAMPLE = Path(__file__).parents[1] / "samples" / "pystd"
WIDTH, LAYERS, WINDOW = 128, 2, 128
COMMON = {
    "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "intermediate_size": 3 * WIDTH,
    "vocab_size": 4096, "max_position_embeddings": 256,
}  # fmt: skip
FAMILIES = {
    "llama": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": False},
    "gemma2": {"num_key_value_heads": 2, "head_dim": 32, "query_pre_attn_scalar": 32},
    "gpt_neox": {},
    "gpt2": {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": 4, "n_positions": 256},
    "mixtral": {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": WIDTH},
    "lfm2": {
        "num_key_value_heads": 2, "num_hidden_layers": 3, "conv_L_cache": 3, "block_multiple_of": 64,
        "layer_types": ["conv", "full_attention", "conv"],
    },
}  # fmt: skip
UNIFORM = ("gptq4", "awq4", "rtn4")


def train(family: str, tokens: Tensor, steps: int, folder: Path) -> Path:
    """Train a model of a family and save it; the checkpoint's folder."""
    torch.manual_seed(0)
    special = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**COMMON, **FAMILIES[family]}, **special))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    for _ in range(steps):
        starts = torch.randint(0, len(tokens) - WINDOW, (8,))
        batch = torch.stack([tokens[at : at + WINDOW] for at in starts])
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step(), schedule.step(), optimizer.zero_grad()
    model.eval().save_pretrained(folder)
    print(family, f"trained, loss {loss.item():.2f}", flush=True)
    return folder


def quantized(graph: Graph, passes: list[Pass]) -> Graph:
    """A copy of the graph after the passes."""
    copy = graph.copy()
    run_passes(copy, passes, PassContext())
    return copy


def engine_bytes(graph: Graph, backend: Backend) -> int:
    """Bytes of all weights as an engine stores them."""
    copy = graph.copy()
    for phase in (pipelines.attention(), pipelines.fuse()):
        run_passes(copy, phase, PassContext())
    program = lower(copy, LowerOptions("f32", backend.profile, max_seq_len=graph.max_seq_len)).program
    return sum(weight.nbytes for weight in program.weights.values())


def losses(graph: Graph, windows: list[list[int]], wanted: list[Tensor]) -> tuple[float, float]:
    """Mean negative log-likelihood, and mean KL divergence from the log-probabilities `wanted`, in nats per token."""
    nll = kl = 0.0
    for ids, want, logits in zip(windows, wanted, logits_of(graph, windows), strict=True):
        logs = torch.log_softmax(logits, -1)
        nll -= float(logs[:-1].gather(1, torch.tensor(ids[1:])[:, None]).mean())
        kl += float((want.exp() * (want - logs)).sum(-1).mean())
    return nll / len(windows), kl / len(windows)


def compare(family: str, model: Path, calibration: list[list[int]], windows: list[list[int]]) -> list[str]:
    """Lines of the table: each uniform method, and auto with as many bytes."""
    graph, backend = load_graph(model, 256), backend_for(TARGETS["cpu"], "f32", False)
    run_passes(graph, pipelines.canonicalize(), PassContext())
    wanted = [torch.log_softmax(logits, -1) for logits in logits_of(graph, windows)]
    base, _ = losses(graph, windows, wanted)
    lines = []
    for method in UNIFORM:
        other = quantized(graph, pipelines.quantize(method, "int8", (), calibration))
        size = engine_bytes(other, backend)
        options = CompileOptions(model, Path("unused"), target="cpu", quant="auto", size=size)
        ours = quantized(graph, auto_passes(options, graph, backend, "f32", calibration))
        theirs, found = losses(other, windows, wanted), losses(ours, windows, wanted)
        rises = [f"{100 * (exp(nll - base) - 1):+.2f} %" for nll, _ in (theirs, found)]
        verdict = "" if found[1] <= theirs[1] else " **worse**"
        lines.append(
            f"| {family} | {method} | {size / 1e6:.3f} MB | {rises[0]} | {rises[1]} | {theirs[1]:.5f} "
            f"| {found[1]:.5f}{verdict} |"
        )
        print(lines[-1], flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    ids = torch.tensor(tokenize(read_text(DEFAULT_TEXT), SAMPLE / "tokenizer.json"))
    part = len(ids) * 4 // 5
    held = [ids[at : at + WINDOW].tolist() for at in range(part, len(ids) - WINDOW, 3 * WINDOW)]
    calibration = [ids[at : at + WINDOW].tolist() for at in range(0, part - WINDOW, part // 32)]
    lines = ["| family | uniform | bytes | rise of perplexity | auto | KL per token | auto |", "|" + "---|" * 7]
    with tempfile.TemporaryDirectory() as folder:
        for family in args.families.split(","):
            model = train(family, ids[:part], args.steps, Path(folder) / family)
            lines += compare(family, model, calibration, held)
    args.out.write_text("\n".join(lines) + "\n")
    sys.exit(any("worse" in line for line in lines))


if __name__ == "__main__":
    main()

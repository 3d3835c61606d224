"""Held-out perplexity of a checkpoint per quantization, by the reference interpreter: the loss of each method.

Run it as `python benchmarks/perplexity.py`; `--model`, `--text`, `--calib` and `--quant` choose other inputs.
`--rows e4m3` or `int8` rounds the input rows of all products except the head as kernels with 8-bit rows do (fp8, W4A8).
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from icc.compiler.calibration import load_calibration, tokenize
from icc.compiler.frontend.load import load_graph
from icc.compiler.graph.graph import Graph
from icc.compiler.graph.interpret import interpret
from icc.compiler.ops import OPS
from icc.compiler.weights.handles import Constant
from icc.passes.base import PassContext
from icc.passes.manager import run_passes
from icc.passes.pipelines import canonicalize, quantize
from torch.utils._python_dispatch import TorchDispatchMode

PRODUCTS = tuple(OPS[name].overload for name in ("linear", "expert_linear"))
SAMPLE = Path(__file__).resolve().parents[1] / "samples" / "pystd"


class RoundedRows(TorchDispatchMode):
    """In this mode each input row of a product is rounded to 8 bits with its own scale; `kind` is e4m3 or int8.

    Products with a matrix of `vocab_size` rows (the head) are left alone.
    """

    def __init__(self, kind: str, vocab_size: int) -> None:
        super().__init__()
        self.kind, self.vocab_size = kind, vocab_size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in PRODUCTS and args[1].shape[-2] != self.vocab_size:
            args = (self._rounded(args[0]), *args[1:])
        return func(*args, **(kwargs or {}))

    def _rounded(self, x: torch.Tensor) -> torch.Tensor:
        peak = x.abs().amax(-1, keepdim=True).clamp(min=1e-30)
        if self.kind == "int8":
            return (x * (127 / peak) + 0.5).floor() * (peak / 127)
        return (x * (448 / peak)).to(torch.float8_e4m3fn).to(x.dtype) * (peak / 448)


def windows(model: Path, text: Path, length: int, limit: int) -> list[list[int]]:
    """Token windows of the held-out text, cut per document and evenly thinned to about `limit` tokens."""
    files = sorted(text.glob("*.txt")) if text.is_dir() else [text]
    found: list[list[int]] = []
    for file in files:
        ids = tokenize(file.read_text(encoding="utf-8"), model / "tokenizer.json")
        found += [ids[i : i + length] for i in range(0, len(ids) - length // 2, length)]
    step = max(1, len(found) * length // limit)
    return found[::step]


def perplexity(graph: Graph, sequences: Sequence[Sequence[int]]) -> float:
    """exp of the mean negative log-likelihood of all tokens after the first of each sequence."""
    total, count = 0.0, 0
    for ids in sequences:
        logits = interpret(graph, ids)[:-1]
        total += float(torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="sum"))
        count += len(ids) - 1
    return math.exp(total / count)


def hold_values(graph: Graph) -> None:
    """Dequantize every weight once, because the interpreter would do so for every window."""
    graph.weights = {name: Constant(weight.load().to(torch.float32)) for name, weight in graph.weights.items()}


def main() -> None:
    """Print one row per quantization."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=SAMPLE)
    parser.add_argument("--text", type=Path, default=SAMPLE / "heldout")
    parser.add_argument("--calib", type=Path)
    parser.add_argument("--quant", default="none,rtn4,awq4,gptq4,awqgptq4")
    parser.add_argument("--rows", choices=("e4m3", "int8"))
    parser.add_argument("--group-size", type=int)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=20000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()

    graph = load_graph(options.model)
    calibration = load_calibration(options.calib, options.model / "tokenizer.json", graph.info.vocab_size)
    held_out = windows(options.model, options.text, options.window, options.tokens)
    rows: dict[str, float] = {}
    for name in options.quant.split(","):
        passes = quantize(name, "int8", (), calibration.sequences, options.group_size)
        graph, ctx, start = load_graph(options.model), PassContext(), time.perf_counter()
        run_passes(graph, [*canonicalize(), *passes], ctx)
        seconds = time.perf_counter() - start
        hold_values(graph)
        with RoundedRows(options.rows, graph.info.vocab_size) if options.rows else nullcontext():
            rows[name] = perplexity(graph, held_out)
        closed = ""
        if {"none", "rtn4"} <= rows.keys() and name not in ("none", "rtn4"):
            closed = f"  closes {(rows['rtn4'] - rows[name]) / (rows['rtn4'] - rows['none']):.0%} of the gap"
        if not options.json:
            print(f"{name:8} perplexity {rows[name]:.4f}  passes {seconds:.1f} s{closed}", flush=True)
    if options.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()

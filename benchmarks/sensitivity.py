"""Are the losses that `--quant auto` expects those that forward passes measure, and does it choose equally well?

    python benchmarks/sensitivity.py samples/pystd --text heldout.txt --sizes 2.8MB,3.6MB

For each weight (one in --every) and each format: the KL divergence of the predictions if GPTQ rounds only that weight,
measured on --tokens tokens, beside the estimate of damage.py from one backward pass. The table has Spearman's rank
correlation over all pairs of weight and format, and over the weights in each format, and the median of expected over
measured. With --sizes: the choice by either at each size, and its loss on the text with the stored weights. Exit code 1
if the correlation over all pairs is below 0.95.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from math import exp
from pathlib import Path
from time import process_time
from typing import Any

import torch
from icc.compiler.backends.registry import backend_for
from icc.compiler.calibration import load_calibration, read_text, tokenize
from icc.compiler.frontend.load import load_graph
from icc.compiler.graph.graph import Graph
from icc.compiler.graph.together import MODEL, Variant, run_together
from icc.compiler.options import CompileOptions
from icc.compiler.sizes import read_size
from icc.compiler.sizing import auto_passes
from icc.compiler.targets import TARGETS
from icc.compiler.weights.formats.blocks import BlockFormat
from icc.compiler.weights.formats.fitting import BlockCoder, encode_blocks, fit_blocks
from icc.compiler.weights.handles import PackedWeight, Weight
from icc.passes import pipelines
from icc.passes.allocation import Curve
from icc.passes.base import PassContext
from icc.passes.manager import run_passes
from icc.passes.quantize import auto, damage
from icc.passes.quantize.gptq_solver import Hessian, solve
from icc.passes.quantize.select import EMBEDDING, WeightJob, as_float
from icc.passes.quantize.stream import Inputs, stream
from torch import Tensor, fx

ENOUGH = 0.95
WINDOW = 512


def chooser(model: Path, graph: Graph, sequences: Sequence[Sequence[int]], size: int) -> auto.QuantizeAuto:
    """The pass `auto` of a compile for CPUs to `size` bytes."""
    options = CompileOptions(model, Path("unused"), target="cpu", quant="auto", size=size)
    found = auto_passes(options, graph, backend_for(TARGETS["cpu"], "f32", False), "f32", sequences)
    return next(each for each in found if isinstance(each, auto.QuantizeAuto))


def rounded(graph: Graph, jobs: Sequence[WeightJob], options: Any, sequences: Sequence[Sequence[int]]) -> list[Weight]:
    """Each weight in each of its formats, rounded by GPTQ in the float32 model, in the order of jobs and formats."""
    found: dict[fx.Node, list[Weight]] = {}
    own = {job.node: (job, [form for form, _ in of if form]) for job, of in zip(jobs, options, strict=True)}

    def visit(node: fx.Node, inputs: Inputs) -> None:
        forms = own[node][1]
        weight = as_float(graph.weight(node.args[1]))  # type: ignore[arg-type]
        planes = weight.reshape(-1, *weight.shape[-2:])
        grams = damage.grams_of(node, inputs)
        hessians = [Hessian.from_gram(moments, damage.DAMPING, act_order=True) for moments in grams]
        found[node] = []
        for form in forms:
            parts = [
                solve(plane, h, BlockCoder(form), fitted=fit_blocks(form, plane, damage.importance_of(h))).parts
                for plane, h in zip(planes, hessians, strict=True)
            ]
            joined = {name: torch.stack([p[name] for p in parts]).reshape(*weight.shape[:-1], -1) for name in parts[0]}
            found[node].append(PackedWeight.pack(joined, form, weight.shape, 0.0))

    stream(graph, sequences, [job.node for job in jobs if job.node.target is not EMBEDDING], visit)
    for job, forms in own.values():
        if job.node.target is EMBEDDING:
            weight = as_float(graph.weight(job.node.args[1]))  # type: ignore[arg-type]
            found[job.node] = [PackedWeight.pack(encode_blocks(f, weight), f, weight.shape, 0.0) for f in forms]
    return [weight for job in jobs for weight in found[job.node]]


def divergences(graph: Graph, text: Sequence[Sequence[int]], variants: Sequence[Variant]) -> list[float]:
    """The mean KL divergence per token of each variant from the model; in float64, as 8-bit ones are small."""
    found, model, count = [0.0] * len(variants), torch.empty(0), sum(map(len, text))
    for answer in run_together(graph, text, variants):
        logs = torch.log_softmax(answer.logits.to(torch.float64), -1)
        if answer.variant == MODEL:
            model = logs
        else:
            found[answer.variant] += float((model.exp() * (model - logs)).sum()) / count
    return found


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    """Spearman's rank correlation."""
    ranks = torch.tensor([one, other], dtype=torch.float64).argsort(-1).argsort(-1).to(torch.float64)
    return float(torch.corrcoef(ranks)[0, 1])


def table(pairs: Sequence[tuple[str, float, float]]) -> tuple[str, float]:
    """The Markdown table, and the correlation over all pairs. pairs: (format, expected, measured)."""
    lines = ["| | pairs | rank correlation | expected / measured, median |", "|---|---|---|---|"]
    kinds = sorted({name for name, *_ in pairs})
    for name in ("", *kinds):
        own = [(e, m) for kind, e, m in pairs if name in ("", kind)]
        rank = spearman(*zip(*own, strict=True))
        ratio = statistics.median(e / max(m, 1e-30) for e, m in own)
        lines.append(f"| {name or 'all'} | {len(own)} | {rank:.3f} | {ratio:.2f} |")
    return "\n".join(lines), spearman([e for _, e, _ in pairs], [m for *_, m in pairs])


class Text:
    """Windows of a text, and the model's log-probabilities for them."""

    def __init__(self, graph: Graph, windows: list[list[int]]) -> None:
        self.windows = windows
        self.model = self._logs(graph)

    def _logs(self, graph: Graph) -> list[Tensor]:
        return [torch.log_softmax(found.logits, -1) for found in run_together(graph, self.windows)]

    def loss(self, graph: Graph) -> tuple[float, float]:
        """The relative rise of a graph's perplexity over the model's, and its mean KL divergence per token."""
        rise = divergence = 0.0
        for ids, want, logs in zip(self.windows, self.model, self._logs(graph), strict=True):
            following = torch.tensor(ids[1:]).unsqueeze(1)
            rise += float((want - logs)[:-1].gather(1, following).sum(dtype=torch.float64))
            divergence += float((want.exp() * (want - logs)).sum(dtype=torch.float64))
        tokens = sum(map(len, self.windows))
        return exp(rise / (tokens - len(self.windows))) - 1, divergence / tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--calib-sequences", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=512, help="tokens for divergences, of two sequences")
    parser.add_argument("--every", type=int, default=1, help="measure every N-th weight")
    parser.add_argument("--text", type=Path, help="for --sizes; neither may be in the calibration text")
    parser.add_argument("--windows", type=int, default=6, help="number of windows, spread over the text")
    parser.add_argument("--sizes", default="", help="comma-separated; then every weight is measured")
    args = parser.parse_args()
    graph = load_graph(args.model, 1024)
    run_passes(graph, pipelines.canonicalize(), PassContext())
    tokenizer, vocabulary = args.model / "tokenizer.json", graph.info.vocab_size
    sequences = load_calibration(None, tokenizer, vocabulary, num_sequences=args.calib_sequences).sequences
    choice = chooser(args.model, graph, sequences, 1 << 60)
    jobs = choice.all_jobs(graph, PassContext())
    heads = auto.lm_heads(graph)
    options = [choice.options(graph, job, job.node in heads) for job in jobs]
    began = process_time()
    expected = damage.measure(graph, jobs, options, sequences, lambda *_: None)
    print(f"one backward pass and all formats: {process_time() - began:.1f} s of CPU", flush=True)
    some = range(0, len(jobs), 1 if args.sizes else args.every)
    tried = [jobs[i] for i in some]
    began = process_time()
    weights = iter(rounded(graph, tried, [options[i] for i in some], sequences))
    names = [(i, o) for i in some for o, (form, _) in enumerate(options[i]) if form]
    variants: list[Variant] = [dict.fromkeys((*jobs[i].nodes, *jobs[i].tables), next(weights)) for i, _ in names]
    text = [list(ids[: args.tokens // 2]) for ids in damage.spread(sequences, 2)]
    measured = dict(zip(names, divergences(graph, text, variants), strict=True))
    print(f"forward passes: {process_time() - began:.1f} s of CPU", flush=True)
    pairs = []
    for (i, o), kl in measured.items():
        option = expected.curves[i].options[o]
        assert isinstance(option.format, BlockFormat)
        pairs.append((f"{option.format.bits} bits", option.damage, kl))
    lines, rank = table(pairs)
    print(lines, flush=True)
    if args.sizes:
        compare(args, graph, sequences, expected, measured)
    sys.exit(rank < ENOUGH)


def compare(
    args: Any, graph: Graph, sequences: Any, expected: damage.Damages, measured: dict[tuple[int, int], float]
) -> None:
    """Print the loss of the choice by expected and by measured losses, at each size."""
    curves = [
        Curve(curve.name, tuple(replace(o, damage=measured.get((i, n), 0.0)) for n, o in enumerate(curve.options)))
        for i, curve in enumerate(expected.curves)
    ]
    ids = tokenize(read_text(args.text), args.model / "tokenizer.json")
    starts = range(0, len(ids) - WINDOW, max(WINDOW, (len(ids) - WINDOW) // args.windows))
    text = Text(graph, [ids[at : at + WINDOW] for at in starts][: args.windows])
    print("| | by | bytes | perplexity | KL per token |", "|---|---|---|---|---|", sep="\n")
    for size in filter(None, args.sizes.split(",")):
        for name, found in (("expected", expected), ("measured", replace(expected, curves=tuple(curves)))):
            auto.measure = lambda *_, found=found: found  # type: ignore[assignment]
            copy, context = graph.copy(), PassContext()
            run_passes(copy, [chooser(args.model, graph, sequences, read_size(size))], context)
            rise, kl = text.loss(copy)
            assert context.allocation is not None
            taken = f"{context.allocation.nbytes / 1e6:.2f} MB"
            print(f"| {size} | {name} | {taken} | {100 * rise:+.2f} % | {kl:.5f} |", flush=True)


if __name__ == "__main__":
    main()

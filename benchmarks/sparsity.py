"""The loss of 2:4 sparsity beside quantization to as many bits: perplexities of pruned and of quantized weights.

    python benchmarks/sparsity.py [MODEL] [--text FOLDER] [--tokens 20000]

Two of every four weights in a row are set to 0: the smallest (magnitude), or those that SparseGPT (Frantar and Alistarh
2023, arXiv:2301.00774) picks, which compensates the error in later columns. The head and the embedding stay as they
are. A pruned matrix stores half of its values and 1 bit of index per weight (two positions of four in 4 bits), as
`mma.sp` reads it. The table is in docs/quantization.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from icc.compiler.calibration import load_calibration
from icc.compiler.frontend.load import load_graph
from icc.compiler.graph.graph import Graph
from icc.compiler.weights.handles import Constant
from icc.passes.base import PassContext
from icc.passes.manager import run_passes
from icc.passes.pipelines import canonicalize
from icc.passes.quantize.gptq import QuantizeGptq
from icc.passes.quantize.gptq_solver import Hessian
from icc.passes.quantize.rtn import QuantizeRtn
from icc.passes.quantize.select import WeightJob, as_float, set_weight
from icc.passes.quantize.stream import stream
from perplexity import SAMPLE, hold_values, perplexity, windows
from torch import Tensor

ROWS = (  # name, how it is pruned, the format of codes and whether GPTQ chooses them, bits per weight with scales
    ("as trained, 16 bits", "", "", False, 16.0),
    ("2:4 by magnitude, 16 bits", "magnitude", "", False, 9.0),
    ("2:4 by SparseGPT, 16 bits", "sparsegpt", "", False, 9.0),
    ("8 bits to nearest", "", "q8", False, 8.125),
    ("2:4 by SparseGPT, then 8 bits to nearest", "sparsegpt", "q8", False, 5.125),
    ("4 bits by GPTQ", "", "q4", True, 4.25),
    ("2:4 by SparseGPT, then 4 bits to nearest", "sparsegpt", "q4", False, 3.25),
    ("3 bits to nearest (q3_k)", "", "q3_k", False, 3.4375),
)


def keep_largest(score: Tensor) -> Tensor:
    """A mask, bool `[N, K]`, of the two largest scores in every four columns of each row."""
    fours = score.unflatten(1, (-1, 4))
    return torch.zeros_like(fours, dtype=torch.bool).scatter(2, fours.topk(2, dim=2).indices, True).flatten(1)


def magnitude(weight: Tensor, hessian: Hessian) -> Tensor:
    """The weight with the smallest two of every four values set to 0."""
    return weight * keep_largest(weight.abs())


def sparsegpt(weight: Tensor, hessian: Hessian) -> Tensor:
    """The weight pruned by SparseGPT: four columns at a time, whose errors are added to later columns."""
    left, factor = weight.clone(), hessian.factor
    for start in range(0, weight.shape[1], 4):
        four = slice(start, start + 4)
        kept = keep_largest((left[:, four] / factor.diagonal()[four]).square())
        for column in range(start, start + 4):
            error = torch.where(kept[:, column - start], 0.0, left[:, column]) / factor[column, column]
            left[:, column:] -= error[:, None] * factor[column, column:]
            left[:, column][~kept[:, column - start]] = 0.0
    return left


def prune(graph: Graph, method: Callable[[Tensor, Hessian], Tensor], sequences: list[list[int]]) -> None:
    """Prune every linear layer except the head in place; each sees the outputs of the pruned layers before it."""
    jobs = {job.node: job for job in QuantizeRtn().jobs(graph, PassContext()) if job.own and not job.tables}

    def visit(node: torch.fx.Node, inputs: dict[torch.fx.Node, list[Tensor]]) -> None:
        job: WeightJob = jobs[node]
        rows = [value.flatten(0, -2) for value in inputs[node.args[0]]]  # type: ignore[index]
        weight = as_float(graph.weight(node.args[1]))  # type: ignore[arg-type]
        pruned = method(weight, Hessian.of(rows, 0.01, act_order=False))
        set_weight(graph, [(one, 1) for one in job.nodes], Constant(pruned))

    stream(graph, sequences, list(jobs), visit)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?", default=SAMPLE)
    parser.add_argument("--text", type=Path, default=SAMPLE / "heldout")
    parser.add_argument("--calib-sequences", type=int, default=32)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=20000)
    given = parser.parse_args()
    vocab_size = load_graph(given.model).info.vocab_size
    tokenizer = given.model / "tokenizer.json"
    sequences = load_calibration(None, tokenizer, vocab_size, num_sequences=given.calib_sequences).sequences
    held_out = windows(given.model, given.text, given.window, given.tokens)
    print("| weights | bits per weight | perplexity | more |\n|---|---|---|---|")
    first = None
    for name, method, form, by_gptq, bits in ROWS:
        graph, ctx = load_graph(given.model), PassContext()
        run_passes(graph, canonicalize(), ctx)
        if method:
            prune(graph, {"magnitude": magnitude, "sparsegpt": sparsegpt}[method], sequences)
        if form:
            passes = (
                QuantizeGptq(format=form, head=None, sequences=sequences)
                if by_gptq
                else QuantizeRtn(format=form, head=None)
            )
            run_passes(graph, [passes], ctx)
        hold_values(graph)
        found = perplexity(graph, held_out)
        first = first or found
        print(f"| {name} | {bits:g} | {found:.3f} | {found / first - 1:+.1%} |", flush=True)


if __name__ == "__main__":
    main()

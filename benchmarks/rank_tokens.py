"""Model families on ranks and stages, quantized and not: are greedy tokens one rank's, and how far are logits?

    python benchmarks/rank_tokens.py [NAME ...] [--out benchmarks/results/rank_families.md]

Tiny configurations of tests/tiny_models.py with a published model's pattern of layers and random weights, compiled up
to the graph that is lowered, once for one rank and once per way of dividing it. Ranks are interpreted in lockstep in
float32. One rank answers a prompt; every way then computes the logits of prompt and answer: if the largest logit at
each position of the answer is one rank's, the way would give the same answer. A difference is the largest of any logit,
over the largest logit; the pass declares its bound. Exit code 1 if a token differs or a bound is exceeded.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from icc.compiler.frontend.load import load_graph
from icc.compiler.graph.graph import Graph
from icc.compiler.graph.interpret import interpret
from icc.passes import pipelines
from icc.passes.base import Pass, PassContext
from icc.passes.manager import run_passes
from icc.passes.parallel.divide import DivideAmongRanks
from icc.passes.parallel.stages import CutIntoStages

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
import tiny_models

HEADING = "# Greedy tokens of families among ranks"
FAMILIES = (
    "llama", "mixtral", "gemma3", "deepseek_v3-latent_grouped_routing", "qwen3_next-delta_rule", "gpt_oss",
)  # fmt: skip
QUANTS, GROUP = ("none", "rtn4"), 16  # small enough that no cut of these matrices splits a group
IDS, NEW = [3, 17, 101, 44, 8, 8, 63, 2, 90, 11, 12], 12
WAYS: dict[str, Pass] = {
    "tensors by 2": DivideAmongRanks(2, tensors=True, experts=False),
    "tensors by 4": DivideAmongRanks(4, tensors=True, experts=False),
    "experts by 2": DivideAmongRanks(2, tensors=False, experts=True),
    "2 stages": CutIntoStages(2),
}
# whole experts and whole layers change no order of sums
BOUNDS = {way: DivideAmongRanks.tolerance or 0.0 if way.startswith("tensors") else 0.0 for way in WAYS}


class Found(NamedTuple):
    """The result of one way. tokens: how many of the answer's are one rank's. difference: see the module."""

    tokens: int
    difference: float


class Row(NamedTuple):
    """A family. found: results by way; a way that divides nothing is missing."""

    name: str
    quant: str
    found: dict[str, Found]


def fused(graph: Graph) -> Graph:
    """The graph, changed in place by the passes that come before lowering."""
    run_passes(graph, pipelines.fuse(), PassContext())
    return graph


def rows_of(name: str) -> Iterator[Row]:
    """Yield the results of a family in all ways, for each quantization."""
    with tempfile.TemporaryDirectory() as folder:
        tiny_models.save_tiny(tiny_models.tiny_configs()[name], Path(folder))
        read = load_graph(Path(folder), 64)
        run_passes(read, pipelines.canonicalize(), PassContext())
        for quant in QUANTS:
            graph = read.copy()
            for phase in (pipelines.quantize(quant, "int8", (), (), GROUP), pipelines.attention()):
                run_passes(graph, phase, PassContext())
            yield Row(name, quant, divided(graph))


def divided(graph: Graph) -> dict[str, Found]:
    """The results of all ways for a graph after the attention passes."""
    alone, ids = fused(graph.copy()), list(IDS)
    for _ in range(NEW):
        ids.append(int(interpret(alone, ids)[-1].argmax()))
    wanted, found = interpret(alone, ids[:-1]), dict[str, Found]()
    assert wanted[len(IDS) - 1 :].argmax(1).tolist() == ids[len(IDS) :], "one rank differs from itself"
    for way, division in WAYS.items():
        own = graph.copy()
        run_passes(own, [division], PassContext())
        if own.ranks > 1:
            found[way] = compared(interpret(fused(own), ids[:-1]), wanted)
    return found


def compared(logits: torch.Tensor, wanted: torch.Tensor) -> Found:
    """Compare logits [T, vocab] with those of one rank."""
    equal = logits[len(IDS) - 1 :].argmax(1) == wanted[len(IDS) - 1 :].argmax(1)
    return Found(int(equal.sum()), float((logits - wanted).abs().max() / wanted.abs().max()))


def is_well(row: Row) -> bool:
    """Whether all tokens are one rank's, and all differences are within their bounds."""
    return all(one.tokens == NEW and one.difference <= BOUNDS[way] for way, one in row.found.items())


def table(rows: list[Row]) -> Iterator[str]:
    """The lines of the Markdown table."""
    yield HEADING
    yield f"\n`python benchmarks/rank_tokens.py`: of {NEW} greedy tokens how many are one rank's, and the largest"
    yield "difference of a logit from one rank's over the largest logit, float32, interpreted. The first line has the"
    yield "bound that the pass declares. A dash: nothing divides so.\n"
    yield f"| family | weights | {' | '.join(WAYS)} |"
    yield "|---|---|" + "---|" * len(WAYS)
    yield f"| bound | | {' | '.join('every bit' if not bound else f'{bound:.0e}' for bound in BOUNDS.values())} |"
    for row in rows:
        cells = [
            f"{row.found[way].tokens}, {row.found[way].difference:.1e}" if way in row.found else "-" for way in WAYS
        ]
        yield f"| {row.name} | {'float32' if row.quant == 'none' else row.quant} | {' | '.join(cells)} |"
    bad = [f"{row.name} {row.quant}" for row in rows if not is_well(row)]
    told = "all tokens are equal, all logits within their bound" if not bad else f"not so: {', '.join(bad)}"
    yield f"\n{len(rows)} rows, {sum(len(row.found) for row in rows)} divisions: {told}."


def read_arguments(description: str | None, default: Sequence[str], out: str, **numbers: int) -> argparse.Namespace:
    """Parse the command line: `names` of tiny configurations (default: `default`), a file --out with the help text
    `out`, and numbers with their defaults. Ends the process if a configuration is unknown."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"tiny configurations (default: {len(default)} of them)")
    parser.add_argument("--out", type=Path, help=out)
    for name, number in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=number)
    options = parser.parse_args()
    known = tiny_models.tiny_configs()
    if unknown := [name for name in options.names if name not in known]:
        parser.error(f"no configuration {unknown[0]!r}")
    options.names = options.names or list(default)
    return options


def main() -> int:
    options = read_arguments(__doc__, FAMILIES, "a file: its part from this table's heading on is replaced")
    rows: list[Row] = []
    for row in (row for name in options.names for row in rows_of(name)):
        rows.append(row)
        print(row, flush=True)
        if options.out is not None:
            before = options.out.read_text().partition(HEADING)[0] if options.out.exists() else ""
            lines = "\n".join(table(rows))
            options.out.write_text(before.rstrip() + ("\n\n" if before.strip() else "") + lines + "\n")
    print(*table(rows), sep="\n")
    return int(not all(map(is_well, rows)))


if __name__ == "__main__":
    sys.exit(main())

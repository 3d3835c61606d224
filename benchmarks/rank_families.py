"""Every tiny configuration divided among ranks: how far the logits are from one rank's, and what stays whole.

    python benchmarks/rank_families.py [NAME ...] [--ranks 2] [--out benchmarks/results/rank_families.md]
    python benchmarks/rank_families.py --tokens [--out benchmarks/results/rank_tokens.md]

The configurations are those of tests/tiny_models.py, with random weights. Each is divided by tensors (columns, rows,
heads, words), by experts, and by both; ranks are interpreted in lockstep, in float32, so that only the order of sums
differs. A difference is the largest of any logit, over the largest logit. Exit code 1 where one is above BOUND.

--tokens: of the kinds of KINDS, quantized and not, whether 8 greedy tokens behind a prompt are those of one rank, for 2
and 4 ranks and each kind of parallelism, those that are used together too. Exit code 1 where some are not.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
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
from icc.passes.parallel.sequence import DivideRows
from icc.runtime.errors import IccError

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
import tiny_models

IDS = [3, 17, 101, 44, 8, 8, 63, 2, 90, 11, 12]
BOUND = 2e-5
WAYS = {"tensors": (True, False), "experts": (False, True), "both": (True, True)}
KINDS = ("llama", "mixtral", "gemma3", "deepseek_v3-latent_grouped_routing", "qwen3_next-delta_rule", "gpt_oss")
QUANTS = ("none", "rtn4", "int8")
TOKENS = 8
PARALLEL = {  # by name, for n ranks: of `pipelines.parallel`, from how many rows on these are divided, 0 for never
    "tensors": lambda n: ((n, 1, 1), 0), "experts": lambda n: ((1, n, 1), 0), "both": lambda n: ((n, n, 1), 0),
    "tensors, rows": lambda n: ((n, 1, 1), 1), "stages": lambda n: ((1, 1, n), 0),
    "2 stages of tensors": lambda n: ((n // 2, 1, 2), 0),
}  # fmt: skip


class Found(NamedTuple):
    """One way of dividing. counts: of the pass. whole: by reason, how many products are not divided."""

    difference: float
    counts: Counter[str]
    whole: Counter[str]


@dataclass
class Row:
    """A configuration. found: by way; a way that divides nothing is missing."""

    name: str
    found: dict[str, Found]
    problem: str = ""


def divide(graph: Graph, logits: torch.Tensor, ranks: int, way: str) -> Found | None:
    """One way; None where it divides nothing."""
    own, context = graph.copy(), PassContext()
    [report] = run_passes(own, [DivideAmongRanks(ranks, *WAYS[way])], context)
    if own.ranks == 1:
        return None
    apart = float((interpret(own, IDS) - logits).abs().max() / logits.abs().max())
    reasons = Counter(re.sub(r"\d+", "N", refusal.reason) for refusal in context.refusals)
    return Found(apart, Counter(report.counts), reasons)


def row_of(name: str, ranks: int) -> Row:
    """A configuration in all ways."""
    with tempfile.TemporaryDirectory() as folder:
        tiny_models.save_tiny(tiny_models.tiny_configs()[name], Path(folder))
        try:
            graph = load_graph(Path(folder), 64)
            for phase in (pipelines.canonicalize(), pipelines.attention()):
                run_passes(graph, phase, PassContext())
        except IccError as error:
            return Row(name, {}, error.message)
        logits = interpret(graph, IDS)
        found = {way: divide(graph, logits, ranks, way) for way in WAYS}
        return Row(name, {way: one for way, one in found.items() if one is not None})


def table(rows: list[Row], ranks: int) -> Iterator[str]:
    """Markdown."""
    yield f"# Tiny configurations among {ranks} ranks\n"
    yield "`python benchmarks/rank_families.py`: the largest difference of a logit from one rank's, over the"
    yield "largest logit, float32, interpreted. Columns, experts and sums are those of a division by both;"
    yield "a dash: nothing divides so.\n"
    yield "| configuration | tensors | experts | both | columns | experts divided | sums | kept whole |"
    yield "|---|---|---|---|---|---|---|---|"
    for row in rows:
        if row.problem:
            yield f"| {row.name} | not read: {row.problem} | | | | | | |"
            continue
        differences = [f"{row.found[way].difference:.1e}" if way in row.found else "-" for way in WAYS]
        last = row.found.get("both")
        counts = Counter[str]() if last is None else last.counts
        numbers = [str(counts[kind]) for kind in ("columns", "experts", "sums", "kept whole")]
        yield f"| {' | '.join([row.name, *differences, *numbers])} |"
    found = [one.difference for row in rows for one in row.found.values()]
    most = max(found, default=0.0)
    yield f"\n{len(rows)} configurations, {len(found)} divisions; the largest difference is {most:.1e}.\n"
    yield "## What stays whole\n"
    yield "| configuration | why, and how many products |"
    yield "|---|---|"
    for row in rows:
        whole = sum((one.whole for way, one in row.found.items() if way == "both"), Counter[str]())
        if whole:
            yield f"| {row.name} | {'; '.join(f'{reason} ({count})' for reason, count in whole.most_common())} |"


def greedy(graph: Graph) -> list[int]:
    """The tokens that follow the prompt, each the largest logit of the last row."""
    ids = list(IDS)
    for _ in range(TOKENS):
        ids.append(int(interpret(graph, ids)[-1].argmax()))
    return ids[len(IDS) :]


def parallel_passes(way: str, ranks: int) -> list[Pass]:
    """What divides a graph so."""
    counts, rows = PARALLEL[way](ranks)
    found = pipelines.parallel(*counts)
    return [*found, DivideRows(rows)] if rows else found


def token_rows(name: str) -> Iterator[tuple[str, str, int, dict[str, str]]]:
    """(configuration, quantization, ranks, what each way gives): "same", "other", or a dash where nothing divides."""
    with tempfile.TemporaryDirectory() as folder:
        tiny_models.save_tiny(tiny_models.tiny_configs()[name], Path(folder))
        for quant in QUANTS:
            graph = load_graph(Path(folder), 64)
            for phase in (
                pipelines.canonicalize(), pipelines.quantize(quant, "int8", (), ()), pipelines.attention(),
            ):  # fmt: skip
                run_passes(graph, phase, PassContext())
            wanted = greedy(graph)
            for ranks in (2, 4):
                found: dict[str, str] = {}
                for way in PARALLEL:
                    own = graph.copy()
                    run_passes(own, parallel_passes(way, ranks), PassContext())
                    divided = own.ranks == ranks
                    found[way] = ("same" if greedy(own) == wanted else "other") if divided else "-"
                yield name, quant, ranks, found


def compare_tokens(out: Path | None) -> int:
    """The table of --tokens."""
    lines = [
        "# Greedy tokens of ranks\n",
        f"`python benchmarks/rank_families.py --tokens`: whether {TOKENS} greedy tokens are those of one rank; tiny",
        "configurations with random weights, ranks interpreted in lockstep. A dash: nothing divides so.\n",
        f"| configuration | quant | ranks | {' | '.join(PARALLEL)} |",
        f"|---|---|---|{'---|' * len(PARALLEL)}",
    ]
    failed = 0
    for name in KINDS:
        for model, quant, ranks, found in token_rows(name):
            failed += sum(value == "other" for value in found.values())
            lines.append(f"| {model} | {quant} | {ranks} | {' | '.join(found.values())} |")
            print(lines[-1], flush=True)
    if out is not None:
        out.write_text("\n".join(lines) + "\n")
    return int(failed > 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="configurations (default: all)")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--out", type=Path, help="the table goes there, too")
    parser.add_argument("--tokens", action="store_true", help="compare greedy tokens of some kinds")
    options = parser.parse_args()
    if options.tokens:
        return compare_tokens(options.out)
    known = tiny_models.tiny_configs()
    if unknown := [name for name in options.names if name not in known]:
        parser.error(f"no configuration {unknown[0]!r}")
    rows: list[Row] = []
    for name in options.names or known:
        rows.append(row_of(name, options.ranks))
        told = {way: f"{one.difference:.1e}" for way, one in rows[-1].found.items()}
        print(name, rows[-1].problem or told, flush=True)
        if options.out is not None:
            options.out.write_text("\n".join(table(rows, options.ranks)) + "\n")
    print(*table(rows, options.ranks), sep="\n")
    return int(any(one.difference > BOUND for row in rows for one in row.found.values()))


if __name__ == "__main__":
    sys.exit(main())

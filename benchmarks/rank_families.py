"""Every tiny configuration divided among ranks: how far its logits are from one rank's, and what stays undivided.

    python benchmarks/rank_families.py [NAME ...] [--ranks 2] [--out benchmarks/results/rank_families.md]

The configurations are those of tests/tiny_models.py, with random weights. Each is divided by tensors (columns, rows,
heads, vocabulary), by experts, and by both; ranks are interpreted in lockstep, in float32, so that only the order of
sums differs. A difference is the largest of any logit, over the largest logit. Exit code 1 if one is above BOUND.
"""

from __future__ import annotations

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
from icc.passes.base import PassContext
from icc.passes.manager import run_passes
from icc.passes.parallel.divide import DivideAmongRanks
from icc.runtime.errors import IccError

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
import tiny_models
from rank_tokens import HEADING as TOKENS_HEADING
from rank_tokens import read_arguments

IDS = [3, 17, 101, 44, 8, 8, 63, 2, 90, 11, 12]
BOUND = 2e-5
WAYS = {"tensors": (True, False), "experts": (False, True), "both": (True, True)}


class Found(NamedTuple):
    """One way of dividing. counts: those that the pass reports. whole: the number of undivided products by reason."""

    difference: float
    counts: Counter[str]
    whole: Counter[str]


@dataclass
class Row:
    """A configuration. found: results by way; a way that divides nothing is missing. problem: why it was not read."""

    name: str
    found: dict[str, Found]
    problem: str = ""


def divide(graph: Graph, logits: torch.Tensor, ranks: int, way: str) -> Found | None:
    """Divide a graph in one way and compare its logits; None if that divides nothing."""
    own, context = graph.copy(), PassContext()
    [report] = run_passes(own, [DivideAmongRanks(ranks, *WAYS[way])], context)
    if own.ranks == 1:
        return None
    apart = float((interpret(own, IDS) - logits).abs().max() / logits.abs().max())
    reasons = Counter(re.sub(r"\d+", "N", refusal.reason) for refusal in context.refusals)
    return Found(apart, Counter(report.counts), reasons)


def row_of(name: str, ranks: int) -> Row:
    """Divide and compare a configuration in all ways."""
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
    """The lines of the Markdown page."""
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


def main() -> int:
    options = read_arguments(__doc__, list(tiny_models.tiny_configs()), "also write the table to this file", ranks=2)
    rows: list[Row] = []
    for name in options.names:
        rows.append(row_of(name, options.ranks))
        told = {way: f"{one.difference:.1e}" for way, one in rows[-1].found.items()}
        print(name, rows[-1].problem or told, flush=True)
        if options.out is not None:
            others = options.out.read_text().partition(TOKENS_HEADING) if options.out.exists() else ("", "", "")
            rest = "\n" + "".join(others[1:]) if others[1] else ""  # the part that rank_tokens.py wrote
            options.out.write_text("\n".join(table(rows, options.ranks)) + "\n" + rest)
    print(*table(rows, options.ranks), sep="\n")
    return int(any(one.difference > BOUND for row in rows for one in row.found.values()))


if __name__ == "__main__":
    sys.exit(main())

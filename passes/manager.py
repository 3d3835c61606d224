"""Runs passes: checks requirements, verifies after each, times, dumps and reports."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..compiler.errors import PassError
from ..compiler.graph.graph import Graph
from ..compiler.graph.printer import print_graph
from ..compiler.graph.verify import Stage, verify
from .base import OPTIMIZED, Pass, PassContext, Refusal


@dataclass(frozen=True)
class PassReport:
    """What one pass did: seconds, rewrites by rule, refusals."""

    name: str
    seconds: float
    modified: bool
    counts: dict[str, int] = field(default_factory=dict)
    refusals: tuple[Refusal, ...] = ()


def run_passes(
    graph: Graph,
    passes: Sequence[Pass],
    ctx: PassContext,
    dump_dir: Path | None = None,
) -> list[PassReport]:
    """Run `passes` in order; raises PassError or VerifyError naming the pass."""
    reports: list[PassReport] = []
    for number, item in enumerate(passes):
        missing = item.requires - graph.facts
        if missing:
            raise PassError(f"pass {item.name!r} requires {', '.join(sorted(missing))}, which no earlier pass ensured")
        start, first = time.perf_counter(), len(ctx.refusals)
        ctx.progress(item.name, number, len(passes))
        result = item.run(graph, ctx)
        graph.sweep()
        graph.facts |= item.ensures
        verify(graph, Stage.OPTIMIZED if OPTIMIZED in graph.facts else Stage.EXPORTED, item.name)
        seconds = time.perf_counter() - start
        reports.append(
            PassReport(item.name, seconds, result.modified, dict(result.counts), tuple(ctx.refusals[first:]))
        )
        if dump_dir is not None:
            dump_dir.mkdir(parents=True, exist_ok=True)
            (dump_dir / f"{number:02d}-{item.name}.txt").write_text(print_graph(graph, modules=True))
    return reports

"""Runs passes: checks what they require and ensure, verifies after each, times, dumps and reports."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..compiler.errors import PassError
from ..compiler.graph.facts import Fact, holding, problem
from ..compiler.graph.graph import Graph
from ..compiler.graph.printer import print_graph
from ..compiler.graph.verify import Stage, verify
from .base import Pass, PassContext, PassResult, Refusal


@dataclass(frozen=True)
class PassReport:
    """The report of one pass: seconds, rewrites by rule, refusals, how many calls the graph has afterwards, and the
    phase of the pipeline."""

    name: str
    seconds: float
    modified: bool
    counts: dict[str, int] = field(default_factory=dict)
    refusals: tuple[Refusal, ...] = ()
    calls: int = 0
    phase: str = ""


def check_order(passes: Sequence[Pass], given: Iterable[str] = ()) -> frozenset[str]:
    """The facts after `passes`, for a graph with the facts `given`; PassError if a pass requires another fact."""
    facts = frozenset(given)
    for item in passes:
        missing = item.requires - facts
        if missing:
            raise PassError(f"pass {item.name!r} requires {', '.join(sorted(missing))}, which no earlier pass ensures")
        facts = (facts - item.breaks) | item.ensures
    return facts


def run_passes(
    graph: Graph,
    passes: Sequence[Pass],
    ctx: PassContext,
    dump_dir: Path | None = None,
) -> list[PassReport]:
    """Run `passes` in order; raises PassError or VerifyError naming the pass. dump_dir: the folder to which the graph
    is written after each pass; None: it is not written.

    The facts that a pass requires must hold in the graph, whether a pass ensured them or not; `check_order` checks the
    order of pipelines. `graph.facts` are facts that passes ensured and that still hold.
    """
    reports: list[PassReport] = []
    for number, item in enumerate(passes):
        _check(graph, item, item.requires, "requires")
        start, first = time.perf_counter(), len(ctx.refusals)
        ctx.progress(item.name, number, len(passes))
        result = item.run(graph, ctx)
        if not isinstance(result, PassResult):
            raise PassError(f"pass {item.name!r}: run must return a PassResult, and returned {result!r}")
        graph.sweep()
        _check(graph, item, item.ensures, "ensures")
        graph.facts = holding(graph, (graph.facts - item.breaks) | item.ensures)
        verify(graph, Stage.OPTIMIZED if Fact.OPTIMIZED in graph.facts else Stage.EXPORTED, item.name)
        seconds = time.perf_counter() - start
        refusals, calls = tuple(ctx.refusals[first:]), sum(node.op == "call_function" for node in graph.nodes)
        reports.append(PassReport(item.name, seconds, result.modified, dict(result.counts), refusals, calls))
        if dump_dir is not None:
            dump_dir.mkdir(parents=True, exist_ok=True)
            (dump_dir / f"{number:02d}-{item.name}.txt").write_text(print_graph(graph, modules=True))
    return reports


def _check(graph: Graph, item: Pass, facts: Iterable[str], verb: str) -> None:
    for fact in sorted(facts):
        found = problem(graph, fact)
        if found:
            raise PassError(f"pass {item.name!r} {verb} {fact}, but {found}")

"""`icc opt`: runs passes over one graph, of a checkpoint or of a text file, for authors of passes.

A text file may name the passes itself, after its graph:

    # a comment
    graph(%token_ids: i64[T]):
      ...
    -- simplify,fuse-pointwise
    the graph after the passes, which a golden test compares
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
from torch import Tensor

from ..passes.base import Pass, PassContext
from ..passes.manager import PassReport, run_passes
from ..passes.prerequisites import facts_of, prerequisites
from ..passes.registry import find_pass
from .errors import PassError
from .frontend.source.identify import is_onnx
from .graph.facts import problem
from .graph.graph import Graph
from .graph.interpret import interpret
from .graph.parser import parse_graph
from .graph.printer import print_graph
from .ops import OPS

MARK = "-- "  # before the passes of a text file
TOKENS = 13  # length of the sequence whose logits are compared


@dataclass(frozen=True)
class GraphFile:
    """A text file of `icc opt`: comment lines, the graph before, the passes, and the text after them."""

    comment: str
    before: str
    passes: str
    after: str

    @classmethod
    def parse(cls, text: str) -> GraphFile:
        """Split a file; `passes` and `after` are empty if the file has only a graph."""
        head, found, tail = text.partition(f"\n{MARK}")
        start = head.find("graph(")
        passes, _, after = tail.partition("\n")
        before = head[start:] if start >= 0 else head
        return cls(head[:start] if start > 0 else "", before.rstrip("\n") + "\n", passes if found else "", after)

    def after_passes(self, found: Optimized) -> GraphFile:
        """The file with the text that a run of its passes produced."""
        return replace(self, after=print_graph(found.graph) + found.notes)

    def __str__(self) -> str:
        return f"{self.comment}{self.before}{MARK}{self.passes}\n{self.after}"


@dataclass(frozen=True)
class Optimized:
    """The result of running passes over a graph.

    difference: max |after - before| / max |before| of the logits, if they were compared; bound: the difference that the
    passes allow, None if one of them changes numbers on purpose. added: passes that ran because others require facts
    that they ensure.
    """

    graph: Graph
    reports: list[PassReport]
    difference: float | None = None
    bound: float | None = None
    added: tuple[str, ...] = ()

    @property
    def notes(self) -> str:
        """How often each rewrite fired, and why others refused, as lines of comments."""
        counts = [f"# {name}: {count}\n" for report in self.reports for name, count in report.counts.items()]
        refusals = [f"# {r.rule} refused: {r.reason}\n" for report in self.reports for r in report.refusals if r.reason]
        return "".join([*counts, *dict.fromkeys(refusals)])


def is_text(source: Path) -> bool:
    """Whether a path is a text file of `icc opt`, not a model."""
    if not source.is_file() or source.name == "config.json":
        return False
    with source.open("rb") as file:
        start = file.read(1 << 12)
    return b"\0" not in start and not is_onnx(source)


def read_graph(source: Path, max_seq_len: int | None = None, task: str = "generate") -> tuple[Graph, str]:
    """The graph of a model for a task, or of a text file, and the passes that the file names. max_seq_len: in tokens,
    None for the default."""
    if not is_text(source):
        from .frontend.load import load_graph

        return load_graph(source, max_seq_len, task=task), ""
    file = GraphFile.parse(source.read_text())
    return parse_graph(file.before), file.passes


def optimize(
    graph: Graph, passes: Sequence[Pass], check: bool = False, compare: bool = False, strict: bool = False
) -> Optimized:
    """Run `passes` in place; each runs after the passes that it requires, which are added if missing.

    check: a second run of each must change nothing. compare: compare logits before and after. strict: raise PassError
    naming the missing passes instead of adding them. Passes that calibrate get random tokens. Raises PassError or
    VerifyError naming the pass, and PassError if the logits differ by more than the passes allow.
    """
    ids = token_ids(graph)
    before = interpret(graph, ids) if compare else None
    reports: list[PassReport] = []
    added: list[str] = []
    for item in passes:
        item = _calibrated(item, ids)
        missing = prerequisites(graph, item)
        if missing and strict:
            raise _incomplete(graph, item, missing)
        reports += run_passes(graph, missing, PassContext())
        added += [one.name for one in missing]
        reports += run_passes(graph, [item], PassContext())
        if check:
            _check_again(graph, item, reports[-1])
    if before is None:
        return Optimized(graph, reports, added=tuple(added))
    ran = [find_pass(name) for name in added]
    found, bound = difference(before, interpret(graph, ids)), _bound([*passes, *ran])
    if bound is not None and found > bound:
        raise PassError(f"the logits differ by {found:.1e}, the passes allow {bound:.1e}")
    return Optimized(graph, reports, found, bound, tuple(added))


def _incomplete(graph: Graph, item: Pass, missing: Sequence[Pass]) -> PassError:
    names = ",".join(one.name for one in missing)
    fact = sorted(item.requires - facts_of(graph))[0]
    reason = problem(graph, fact) or "no pass has ensured it"
    return PassError(f"pass {item.name!r} requires {fact}, but {reason}", f"give -p {names},{item.name}")


def difference(before: Tensor, after: Tensor) -> float:
    """max |after - before| / max |before| of logits [rows, vocabulary]. PassError if their shapes differ."""
    if before.shape != after.shape:
        raise PassError(f"the logits were {tuple(before.shape)} and are {tuple(after.shape)}")
    wide = before.to(torch.float64)
    return float((after.to(torch.float64) - wide).abs().max()) / (float(wide.abs().max()) or 1.0)


def token_ids(graph: Graph) -> list[int]:
    """A sequence of random tokens within the graph's vocabulary and its position tables."""
    tokens = graph.input("token_ids")
    embedding = OPS["embedding"].overload
    tables = [u.args[1] for u in tokens.users if u.target is embedding and u.args[0] is tokens] if tokens else []
    known = min((table.meta["type"].shape[0] for table in tables), default=graph.info.vocab_size)  # type: ignore[union-attr]
    count = min(TOKENS, graph.max_seq_len or TOKENS)
    return torch.randint(0, max(known, 1), (count,), generator=torch.Generator().manual_seed(0)).tolist()


def explain(reports: Sequence[PassReport], name: str) -> str:
    """Where and why `name`, a pass or a rule, refused."""
    lines = []
    for report in reports:
        found = [r for r in report.refusals if r.reason and name in (report.name, r.rule)]
        lines += [f"{r.rule} at {r.node}: {r.reason}" for r in found]
        if report.name == name:
            lines.append(f"{name}: {dict(report.counts) or 'nothing to do'}")
    ran = ", ".join(report.name for report in reports) or "no pass"
    return "\n".join(lines) or f"{name} refused nothing; ran: {ran}"


def uncalibrated(passes: Sequence[Pass]) -> list[str]:
    """The names of passes that calibrate and were given no sequences."""
    return [item.name for item in passes if _calibrated(item, []) is not item]


def _calibrated(item: Pass, ids: list[int]) -> Pass:
    wants = any(field.name == "sequences" for field in fields(item)) and not item.sequences  # type: ignore[attr-defined]
    return replace(item, sequences=[ids]) if wants else item  # type: ignore[call-arg]


def _check_again(graph: Graph, item: Pass, report: PassReport) -> None:
    text = print_graph(graph)
    if report.modified != bool(report.counts):
        raise PassError(f"pass {item.name!r} says modified={report.modified} and counts {report.counts}")
    again = item.run(graph, PassContext())
    graph.sweep()
    if again.modified or print_graph(graph) != text:
        raise PassError(f"a second run of pass {item.name!r} changes the graph again: {dict(again.counts)}")


def _bound(passes: Sequence[Pass | type[Pass]]) -> float | None:
    bounds = [item.tolerance for item in passes]
    return None if None in bounds else sum(b for b in bounds if b is not None)

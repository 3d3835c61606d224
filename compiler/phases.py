"""The phases of the pipeline as they run: what each pass did, and the graph that each phase left, for report.json."""

from __future__ import annotations

import operator
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import fx

from ..passes.allocation import Allocation
from ..passes.base import Pass, PassContext
from ..passes.manager import PassReport, run_passes
from ..passes.quantized import QuantRecord
from .constant_argument import ConstantArgument
from .graph.graph import Graph
from .graph.printer import constant_text, target_name
from .program.program import Program
from .program.rewrites import LOWER, RewriteReport
from .program.steps_text import steps_text

_LAYER = re.compile(r"^(?:.*?\.)?(\d+)(?:\.|$)")
# Numbers that may differ between equal layers, such as the layer's number.
_OWN = re.compile(r"(?<=, )-?[\d.e-]+(?=[,)])|(?<=\{layer=)\d+")
_MOST_KINDS = 12  # kinds of layers that are reported; a model has one to three, more if formats differ by layer


@dataclass(frozen=True)
class LayerKind:
    """Layers with equal graphs, and the graph of the first: a line per call, `%number = op(arguments): type`.

    Values from other layers are shown as %in; the names of weights and modules are relative to the layer.
    """

    layers: list[int]
    graph: list[str]


@dataclass(frozen=True)
class PhaseSnapshot:
    """The graph after a phase: how many calls of each op it has, and its layers."""

    name: str
    calls: int
    ops: dict[str, int]
    kinds: list[LayerKind]


class Phases:
    """Runs phases over a graph. `reports` has the passes' reports, `stages` the graph as traced and after each phase
    that had passes; caches: the choice of --kv-bits. dump: the directory to which the graph is written after each pass,
    with a folder per phase."""

    def __init__(self, graph: Graph, context: PassContext, dump: Path | None = None) -> None:
        self._graph, self._context, self._dump = graph, context, dump
        self.reports: list[PassReport] = []
        self.caches: Allocation | None = None
        self.stages = [stage_of(graph, "trace")]

    @property
    def allocation(self) -> Allocation | None:
        """The choice of --quant auto; None for other quantization."""
        return self._context.allocation

    @property
    def records(self) -> list[QuantRecord]:
        """The records of quantization, one per weight."""
        return self._context.quant_records

    def observe(self, report: RewriteReport, program: Program) -> None:
        """Record the report of the lowering, or of a rewrite of its steps."""
        counts = {report.name: report.count} if report.count and report.name != LOWER else {}
        number = sum(done.phase == LOWER for done in self.reports)
        self.reports.append(PassReport(report.name, report.seconds, bool(counts), counts, (), report.steps, LOWER))
        if self._dump is not None:
            folder = self._dump / LOWER
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{number:02d}-{report.name}.txt").write_text(steps_text(program))

    def run(self, phase: str, passes: Sequence[Pass]) -> None:
        """Run one phase."""
        reports = run_passes(self._graph, passes, self._context, self._dump and self._dump / phase)
        self.reports += [replace(report, phase=phase) for report in reports]
        if passes:
            self.stages.append(stage_of(self._graph, phase))


def stage_of(graph: Graph, name: str) -> PhaseSnapshot:
    """A snapshot of the graph after a stage of its compile."""
    calls = [node for node in graph.nodes if node.op == "call_function"]
    ops = Counter(target_name(node.target) for node in calls)
    layers: dict[int, list[fx.Node]] = defaultdict(list)
    for node in calls:
        if (number := layer_of(node)) is not None:
            layers[number].append(node)
    kinds: dict[tuple[str, ...], LayerKind] = {}
    for number, nodes in sorted(layers.items()):
        lines = list(_lines(graph, nodes))
        alike = tuple(_OWN.sub("", line) for line in lines)
        if alike in kinds:
            kinds[alike].layers.append(number)
        elif len(kinds) < _MOST_KINDS:
            kinds[alike] = LayerKind([number], lines)
    return PhaseSnapshot(name, len(calls), dict(ops.most_common()), list(kinds.values()))


def layer_of(node: fx.Node) -> int | None:
    """The layer in the name of a node's module; None if it names none. A getitem belongs to the layer of its
    operand."""
    if node.target is operator.getitem:
        node = node.args[0]  # type: ignore[assignment]
    found = _LAYER.match(node.meta.get("module", ""))
    return int(found[1]) if found else None


def _lines(graph: Graph, nodes: Sequence[fx.Node]) -> Iterator[str]:
    """The calls of one layer as text."""
    names = {node: f"%{number}" for number, node in enumerate(nodes)}
    for node in nodes:
        found = node.meta["type"]
        kind = f"({', '.join(map(str, found))})" if isinstance(found, tuple) else str(found)
        given = [_argument(graph, arg, names) for arg in node.args]
        given += [f"{name}={_argument(graph, arg, names)}" for name, arg in node.kwargs.items()]
        module = _LAYER.sub("", node.meta.get("module", ""), count=1)
        note = f"  # {module}" if module else ""
        yield f"{names[node]} = {target_name(node.target)}({', '.join(given)}): {kind}{note}"


def _argument(graph: Graph, value: Any, names: dict[fx.Node, str]) -> str:
    if isinstance(value, fx.Node):
        if value.op != "get_attr":
            return names.get(value, "%in")
        parts = [_LAYER.sub("", part, count=1) for part in str(value.target).split("+")]
        return f"@{'+'.join(parts)}:{graph.weight(value).describe()}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_argument(graph, part, names) for part in value)}]"
    if isinstance(value, ConstantArgument):
        return constant_text(value, lambda part: _argument(graph, part, names))
    return str(value)

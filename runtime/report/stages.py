"""The section "graph": how the compile changed the graph, stage by stage, down to the steps of the program."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from . import graph
from .facts import OUTSIDE, EngineFacts, StepFacts
from .html import Markup, count, el, size, table

_LINE = re.compile(r"%(\d+) = ([^\s(]+)\((.*)\): (.+?)(?:  # (.*))?$")
_READ = re.compile(r"%(\d+)")
_WEIGHT = re.compile(r"@([^\s:]+):([^\s\[]+)\[")
_MOST_NODES = 160  # the most nodes that are drawn; of larger graphs only numbers are shown
_TITLES = {
    "trace": "traced",
    "canonicalize": "canonical",
    "quantize": "quantized",
    "speculate": "with draft heads",
    "attention": "paged attention",
    "fuse": "fused",
}
_FAMILIES = (
    ("linear", "k-product"),
    ("matmul", "k-product"),
    ("expert", "k-product"),
    ("attention", "k-attention"),
    ("kv_write", "k-attention"),
    ("norm", "k-norm"),
    ("reduce", "k-norm"),
    ("embedding", "k-table"),
    ("select_rows", "k-table"),
    ("quantize", "k-quant"),
    ("view", "k-shape"),
    ("slice", "k-shape"),
    ("getitem", "k-shape"),
    ("cat", "k-shape"),
)


def graph_section(facts: EngineFacts) -> list[Markup]:
    """The stages in numbers, and the graph of a layer in each of them."""
    stages: Sequence[Mapping[str, Any]] = facts.report.get("stages", ())
    layer = [el("h3", "One layer in every stage"), _columns(facts, stages)]
    if not stages:  # the engine's report.json has no stages
        return layer
    return [_flow(facts, stages), *layer, el("h3", "Calls by op"), _ops(facts, stages)]


def _flow(facts: EngineFacts, stages: Sequence[Mapping[str, Any]]) -> Markup:
    """A table of the number of calls in each stage."""
    numbers = [(_TITLES.get(s["name"], s["name"]), s["calls"], "calls") for s in stages]
    numbers.append(("program", len(facts.steps), "steps"))
    most = max(n for _, n, _ in numbers) or 1
    bars = [
        el(
            "div",
            el("b", count(n)),
            el("span", unit),
            el("i", style=f"height:{max(110 * n / most, 2):.0f}px"),
            el("em", title),
        )
        for title, n, unit in numbers
    ]
    return el("div", bars, class_="flow")


def _columns(facts: EngineFacts, stages: Sequence[Mapping[str, Any]]) -> Markup:
    """The graph of a layer in each stage, side by side, without the stages that did not change it."""
    drawings: list[tuple[str, str, list[graph.Node]]] = []
    layer = 0
    for stage in stages:
        kinds = sorted(stage["kinds"], key=lambda kind: -len(kind["layers"]))
        if kinds:
            layer = max(layer, min(kinds[0]["layers"]))
            name = str(_TITLES.get(stage["name"], stage["name"]))
            drawings.append((name, layers_text(kinds[0]["layers"]), list(_parsed(kinds[0]["graph"]))))
    steps, alike = _typical(facts, layer)
    drawings.append(("program", layers_text(alike), list(_of_steps(facts, steps))))
    shown = [drawings[0], *(after for before, after in pairwise(drawings) if after[2] != before[2])]
    columns = []
    for name, layers, nodes in shown:
        fits = 0 < len(nodes) <= _MOST_NODES
        drawing = graph.draw(nodes, f"a layer, {name}") if fits else el("p", f"{len(nodes)} nodes: too many to draw")
        head = el("figcaption", el("b", name), el("span", f"{len(nodes)} nodes, {layers}"))
        columns.append(el("figure", head, drawing))
    return el("div", columns, class_="columns")


def layers_text(layers: Sequence[int]) -> str:
    """A text such as: layers 0 to 3, 5."""
    if not layers or OUTSIDE in layers:
        return "no layer"
    runs: list[list[int]] = []
    for number in sorted(layers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = [f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    return ("layers " if len(layers) > 1 else "layer ") + ", ".join(parts)


def _parsed(lines: Sequence[str]) -> Iterator[graph.Node]:
    """Parse the nodes of a layer's text, see compiler/phases.py."""
    for line in lines:
        found = _LINE.match(line)
        if found is None:
            continue
        _, op, given, kind, module = found.groups()
        weights = [f"{name.removesuffix('.weight')} {form}" for name, form in _WEIGHT.findall(given)]
        forms = sorted({form for _, form in _WEIGHT.findall(given)})
        short = op.removeprefix("icc.").removeprefix("aten.").split(".")[0]
        label = f"{short} {forms[0]}" if forms and "linear" in op else short
        inputs = tuple(dict.fromkeys(int(n) for n in _READ.findall(given)))
        title = "\n".join(filter(None, [f"{op}: {kind}", module, *weights]))
        yield graph.Node(label, title, inputs, family(op))


def _typical(facts: EngineFacts, wanted: int) -> tuple[list[StepFacts], list[int]]:
    """The steps of a typical layer, one whose kernels most layers share, and the numbers of these layers."""
    by_layer: dict[int, list[StepFacts]] = {}
    for step in facts.steps:
        if step.layer != OUTSIDE:
            by_layer.setdefault(step.layer, []).append(step)
    if not by_layer:
        return list(facts.steps), [OUTSIDE]
    shapes = {layer: tuple(step.kernel for step in steps) for layer, steps in by_layer.items()}
    common = Counter(shapes.values()).most_common(1)[0][0]
    alike = [layer for layer, shape in shapes.items() if shape == common]
    return by_layer[next((layer for layer in alike if layer >= wanted), alike[0])], alike


def _of_steps(facts: EngineFacts, steps: Sequence[StepFacts]) -> Iterator[graph.Node]:
    """The steps as nodes: a step reads the first earlier step that has one of its buffers."""
    holders: dict[str, int] = {}
    for number, step in enumerate(steps):
        inputs = tuple(dict.fromkeys(holders[name] for name in step.buffers if name in holders))
        weights = [f"{name}\n  {facts.program.weights[name].format}, {size(facts.program.weights[name].nbytes)}"
                   for name in step.weights if name in facts.program.weights]  # fmt: skip
        formats = [facts.program.weights[name].format for name in step.weights if name in facts.program.weights]
        label = f"{step.op} {formats[0]}" if formats and "linear" in step.op else step.op
        yield graph.Node(label, "\n".join([f"step {step.number}: {step.kernel}", *weights]), inputs, family(step.op))
        for name in step.buffers:
            holders.setdefault(name, number)


def family(op: str) -> str:
    """The CSS class for an op's colour."""
    return next((kind for part, kind in _FAMILIES if part in op), "k-point")


def _ops(facts: EngineFacts, stages: Sequence[Mapping[str, Any]]) -> Markup:
    """A table of the number of calls of each op in every stage."""
    found = [(_TITLES.get(s["name"], s["name"]), s["ops"]) for s in stages]
    found.append(("program", Counter(step.op for step in facts.steps)))
    names = list(dict.fromkeys(op for _, ops in found for op in ops))
    rows = [[el("code", op), *(ops.get(op) for _, ops in found)] for op in names]
    return el("details", el("summary", f"{len(names)} ops"), table(["op", *(name for name, _ in found)], rows))

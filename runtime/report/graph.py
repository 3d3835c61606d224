"""Draws a small dataflow graph as SVG: nodes in rows by their depth, edges as curves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .html import Markup, el

_ROW, _NODE, _GAP, _CHAR = 34, 22, 8, 6.1
_LEAST_WIDTH = 130.0


@dataclass(frozen=True)
class Node:
    """A node: its text, its tooltip, the indices of the nodes that it reads, and its CSS class."""

    label: str
    title: str
    inputs: tuple[int, ...]
    kind: str

    @property
    def width(self) -> float:
        """The width in pixels."""
        return 14 + _CHAR * len(self.label)


def draw(nodes: Sequence[Node], label: str) -> Markup:
    """Draw nodes, each of which only reads earlier ones."""
    depth = _depths(nodes)
    rows: dict[int, list[int]] = defaultdict(list)
    for number in range(len(nodes)):
        rows[depth[number]].append(number)
    places = _places(nodes, rows)
    left = min((x - nodes[n].width / 2 for n, (x, _) in places.items()), default=0.0)
    right = max((x + nodes[n].width / 2 for n, (x, _) in places.items()), default=0.0)
    pad = max(_LEAST_WIDTH - (right - left), 0.0) / 2 + 22
    edges = [_edge(places[i], places[n], depth[n] - depth[i]) for n, node in enumerate(nodes) for i in node.inputs]
    boxes = [_box(node, *places[n]) for n, node in enumerate(nodes)]
    width, height = right - left + 2 * pad, (max(rows, default=0) + 1) * _ROW + 4
    return el(
        "svg",
        edges,
        boxes,
        class_="graph",
        width=round(width),
        height=height,
        viewBox=f"{left - pad:.0f} 0 {width:.0f} {height}",
        role="img",
        aria_label=label,
    )


def _depths(nodes: Sequence[Node]) -> list[int]:
    """The row of every node: after the last node that it reads; a node that reads nothing is just above its first
    reader."""
    depth: list[int] = []
    for node in nodes:
        depth.append(max((depth[i] + 1 for i in node.inputs), default=0))
    users: dict[int, list[int]] = defaultdict(list)
    for number, node in enumerate(nodes):
        for i in node.inputs:
            users[i].append(number)
    for number in reversed(range(len(nodes))):
        if not nodes[number].inputs and users[number]:
            depth[number] = min(depth[n] for n in users[number]) - 1
    lowest = min(depth, default=0)
    return [value - lowest for value in depth]


def _places(nodes: Sequence[Node], rows: Mapping[int, list[int]]) -> dict[int, tuple[float, float]]:
    """The centre of every node, (x, y): nodes of a row are ordered by the positions of the nodes they read, and rows
    are centred."""
    places: dict[int, tuple[float, float]] = {}
    for row in sorted(rows):
        wanted = {}
        for order, number in enumerate(rows[row]):
            found = [places[i][0] for i in nodes[number].inputs if i in places]
            wanted[number] = (sum(found) / len(found) if found else 0.0, order)
        ordered = sorted(rows[row], key=lambda n: wanted[n])
        whole = sum(nodes[n].width for n in ordered) + _GAP * (len(ordered) - 1)
        middle = wanted[ordered[0]][0] if len(ordered) == 1 else 0.0
        x = middle - whole / 2
        for number in ordered:
            places[number] = (round(x + nodes[number].width / 2, 1), row * _ROW + _NODE / 2 + 2)
            x += nodes[number].width + _GAP
    return places


def _edge(begin: tuple[float, float], end: tuple[float, float], rows: int) -> Markup:
    """A curve from a node to one below it; a long edge bends around the rows between."""
    (x1, y1), (x2, y2) = begin, end
    y1, y2 = y1 + _NODE / 2, y2 - _NODE / 2
    bend = 0.0 if rows <= 1 else min(24 + 7 * rows, 96) * (1 if x1 >= x2 else -1)
    half = (y2 - y1) / 2
    curve = f"M{x1} {y1}C{x1 + bend:.1f} {y1 + half:.1f} {x2 + bend:.1f} {y2 - half:.1f} {x2} {y2}"
    return el("path", class_="edge" if rows <= 1 else "edge far", d=curve)


def _box(node: Node, x: float, y: float) -> Markup:
    shape = el("rect", class_=node.kind, x=round(x - node.width / 2, 1), y=y - _NODE / 2, width=round(node.width, 1),
               height=_NODE, rx=6)  # fmt: skip
    return el("g", el("title", node.title), shape, el("text", node.label, x=x, y=y + 4, text_anchor="middle"))

"""Charts as SVG: stacked bars, lines, and logarithmic scales for a roofline. Coordinates are pixels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor, log10

from .html import Child, Markup, el, size

PALETTE = 10  # number of classes c0, c1, ... in the style sheet
_WIDTH = 960.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 82, 14, 12, 34


def colours(names: Sequence[str]) -> dict[str, str]:
    """A CSS class for each name; names beyond the palette share its last class."""
    return {name: f"c{min(n, PALETTE - 1)}" for n, name in enumerate(names)}


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers from at most `low` to at least `high`."""
    span = (high - low) or abs(high) or 1.0
    power = 10 ** floor(log10(span / most))
    step = next((f * power for f in (1, 2, 2.5, 5, 10) if f * power * most >= span * 0.999), 10 * power)
    first, last = floor(low / step + 1e-9), ceil(high / step - 1e-9)
    return [round(n * step, 12) for n in range(first, max(last, first + 1) + 1)]


def byte_ticks(high: float) -> list[float]:
    """Ticks in bytes from 0 to at least `high` that are round in KiB, MiB or GiB."""
    unit = next((1024.0**n for n in (3, 2, 1) if high >= 1024**n), 1.0)
    return [mark * unit for mark in ticks(0, high / unit)]


@dataclass(frozen=True)
class Frame:
    """A chart's area and the scales that map values to pixels."""

    width: float
    height: float
    x: Callable[[float], float]
    y: Callable[[float], float]

    @classmethod
    def linear(cls, width: float, height: float, xs: tuple[float, float], ys: tuple[float, float]) -> Frame:
        """Linear scales over the ranges."""

        def place(low: float, high: float, begin: float, end: float) -> Callable[[float], float]:
            return lambda value: round(begin + (value - low) / ((high - low) or 1) * (end - begin), 1)

        return cls(width, height, place(*xs, _LEFT, width - _RIGHT), place(*ys, height - _BOTTOM, _TOP))

    @classmethod
    def logarithmic(cls, width: float, height: float, xs: tuple[float, float], ys: tuple[float, float]) -> Frame:
        """Logarithmic scales over the ranges."""
        flat = cls.linear(width, height, (log10(xs[0]), log10(xs[1])), (log10(ys[0]), log10(ys[1])))
        return cls(width, height, lambda v: flat.x(log10(v)), lambda v: flat.y(log10(v)))

    def rows(self, values: Sequence[float], show: Callable[[float], str]) -> list[Markup]:
        """Horizontal grid lines with their values."""
        found = []
        for value in values:
            y = self.y(value)
            found.append(el("line", class_="grid", x1=_LEFT, x2=self.width - _RIGHT, y1=y, y2=y))
            found.append(el("text", show(value), x=_LEFT - 7, y=y + 4, text_anchor="end"))
        return found

    def columns(self, values: Sequence[float], show: Callable[[float], str], lines: bool = False) -> list[Markup]:
        """Values along the bottom; lines: with vertical grid lines."""
        found = []
        bottom = self.height - _BOTTOM
        for value in values:
            x = self.x(value)
            if lines:
                found.append(el("line", class_="grid", x1=x, x2=x, y1=_TOP, y2=bottom))
            found.append(el("text", show(value), x=x, y=bottom + 15, text_anchor="middle"))
        return found

    def titles(self, x: str, y: str = "") -> list[Markup]:
        """The titles of the axes."""
        middle = (_LEFT + self.width - _RIGHT) / 2
        titles = [el("text", x, class_="axis", x=middle, y=self.height - 3, text_anchor="middle")]
        if y:
            place = f"translate(12 {(self.height - _BOTTOM + _TOP) / 2}) rotate(-90)"
            titles.append(el("text", y, class_="axis", transform=place, text_anchor="middle"))
        return titles

    def svg(self, *children: Child, label: str) -> Markup:
        """The chart's SVG, in a box that scrolls if it is too narrow."""
        box = f"0 0 {self.width:g} {self.height:g}"
        wide = f"min-width:{self.width:g}px" if self.width > _WIDTH else None
        drawing = el("svg", *children, class_="chart", viewBox=box, role="img", aria_label=label, style=wide)
        return el("div", drawing, class_="scroll")


def legend(named: Mapping[str, str]) -> Markup:
    """A legend: names beside the colour of their class."""
    return el("div", [el("span", el("i", class_=kind), name) for name, kind in named.items()], class_="legend")


def stacks(
    bars: Sequence[tuple[str, Mapping[str, float]]], classes: Mapping[str, str], show: Callable[[float], str], y: str
) -> Markup:
    """A stacked bar chart, one bar per label."""
    highest = max((sum(parts.values()) for _, parts in bars), default=0.0) or 1.0
    marks = byte_ticks(highest) if show is size else ticks(0, highest)
    frame = Frame.linear(_WIDTH, 250, (0, len(bars)), (0, marks[-1]))
    every = ceil(len(bars) / 24)
    shapes = []
    for number, (label, parts) in enumerate(bars):
        left, width, floor_ = frame.x(number + 0.12), frame.x(number + 0.88) - frame.x(number + 0.12), 0.0
        whole = sum(parts.values())
        for name in classes:
            value = parts.get(name, 0.0)
            if not value:
                continue
            top, bottom = frame.y(floor_ + value), frame.y(floor_)
            text = f"{label}: {name} {show(value)} of {show(whole)}"
            box = {"x": left, "y": top, "width": round(width, 1), "height": max(round(bottom - top, 1), 0.3)}
            shapes.append(el("rect", el("title", text), class_=classes[name], **box))
            floor_ += value
    labels = [
        el("text", label, x=frame.x(n + 0.5), y=frame.height - _BOTTOM + 15, text_anchor="middle")
        for n, (label, _) in enumerate(bars)
        if n % every == 0
    ]
    return frame.svg(frame.rows(marks, show), shapes, labels, frame.titles("layer", y), label=f"{y} by layer")


def lines(
    series: Mapping[str, Sequence[tuple[float, float, str]]],
    classes: Mapping[str, str],
    show: Callable[[float], str],
    x: str,
    y: str,
    least: float = 0.0,
) -> Markup:
    """A line chart: one line per name through points (x, y, title). The y axis need not begin at 0, but its range is at
    least `least`, so that small differences look small."""
    points = [point for line in series.values() for point in line]
    low, top = min(p[1] for p in points), max(p[1] for p in points)
    short = max(least - (top - low), 0.0) / 2
    marks = ticks(low - short, top + short)
    high = max(p[0] for p in points)
    frame = Frame.linear(_WIDTH, 270, (-0.5, high + 0.5), (marks[0], marks[-1]))
    drawn = []
    for name, line in series.items():
        path = "M" + "L".join(f"{frame.x(a)} {frame.y(b)}" for a, b, _ in line)
        drawn.append(el("path", class_=f"line {classes[name]}", d=path))
        for a, b, text in line:
            drawn.append(el("circle", el("title", text), class_=classes[name], cx=frame.x(a), cy=frame.y(b), r=3.2))
    step = ceil((high + 1) / 24)
    below = frame.columns([float(n) for n in range(0, int(high) + 1, step)], lambda v: f"{v:.0f}")
    return frame.svg(frame.rows(marks, show), below, drawn, frame.titles(x, y), label=f"{y} by {x}")

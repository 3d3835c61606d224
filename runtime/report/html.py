"""Elements of HTML and SVG as escaped text, and numbers in readable units."""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape


class Markup(str):
    """Text that is already HTML and must not be escaped."""

    __slots__ = ()


Child = Markup | str | int | float | None | Iterable["Child"]


def el(tag: str, *children: Child, **attributes: object) -> Markup:
    """One element. `class_` and `for_` lose their underscore, other underscores become dashes; attributes that are None
    or False are left out."""
    parts = []
    for name, value in attributes.items():
        if value is None or value is False:
            continue
        name = name.rstrip("_").replace("_", "-")
        parts.append(f" {name}" if value is True else f' {name}="{escape(_shown(value))}"')
    inner = join(children)
    if not inner and tag in _VOID:
        return Markup(f"<{tag}{''.join(parts)}/>")
    return Markup(f"<{tag}{''.join(parts)}>{inner}</{tag}>")


_NUMBER = re.compile(r"[+-]?[\d.]+(?:e[+-]?\d+)?(?: \S{1,4})?$")
NONE = "\u2013"  # shown in a cell without a value
_VOID = {"rect", "line", "path", "circle", "col", "br", "meta", "input", "use"}


def join(children: Iterable[Child]) -> Markup:
    """Join children, escaped; None adds nothing."""
    out = []
    for child in children:
        if isinstance(child, Markup):
            out.append(child)
        elif isinstance(child, str | int | float):
            out.append(escape(_shown(child), quote=False))
        elif child is not None:
            out.append(join(child))
    return Markup("".join(out))


def table(head: Iterable[Child], rows: Iterable[Iterable[Child]], class_: str = "") -> Markup:
    """A table; columns in which all cells are numbers, with or without a unit, are right-aligned by a CSS class."""
    body = [list(row) for row in rows]
    heads = list(head)
    right = [all(_is_number(row[n]) for row in body) and heads[n] != "" for n in range(len(heads))]
    side = ["n" if flag and body else None for flag in right]
    top = el("tr", [el("th", cell, class_=side[n]) for n, cell in enumerate(heads)])
    lines = [el("tr", [el("td", cell, class_=side[n]) for n, cell in enumerate(row)]) for row in body]
    return el("div", el("table", el("thead", top), el("tbody", lines)), class_=f"table {class_}".strip())


def _is_number(cell: Child) -> bool:
    return cell in (NONE, None, "") or isinstance(cell, int | float) or bool(_NUMBER.match(str(cell)))


def _shown(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def size(count: float) -> str:
    """A number of bytes as text, such as 3.40 GiB."""
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{_digits(count)} {unit}"
        count /= 1024
    return f"{_digits(count)} GiB"


def seconds(value: float) -> str:
    """A time in seconds as text, such as 3.4 ms."""
    for factor, unit in ((1, "s"), (1e3, "ms"), (1e6, "µs")):
        if value * factor >= 1:
            return f"{_digits(value * factor)} {unit}"
    return f"{_digits(value * 1e9)} ns" if value else "0 s"


def count(value: float) -> str:
    """A count as text, such as 1.24 G."""
    for factor, unit in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e4, " k")):
        if abs(value) >= factor:
            return f"{_digits(value / (1e3 if unit == ' k' else factor))}{unit}"
    return _digits(value)


def _digits(value: float) -> str:
    """A number with three significant digits."""
    if value == int(value) and abs(value) < 1000:
        return str(int(value))
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"

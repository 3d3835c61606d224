"""Reports of loads: a table for the terminal, and self-contained HTML pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from .summary import PERCENTILES, Summary

_WIDTH, _HEIGHT, _MARGIN = 520, 300, 56
_COLOURS = ("#2563eb", "#dc2626", "#16a34a")


def as_table(summaries: Sequence[Summary]) -> str:
    """A text table, one line per load."""
    header = ("load", "ok", "req/s", "in tok/s", "out tok/s", "TTFT p50", "p99", "token p50", "p99", "e2e p50", "good")
    rows = [header, *[_row(summary) for summary in summaries]]
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def _row(summary: Summary) -> tuple[str, ...]:
    def at(values: dict[str, float], percentile: int) -> str:
        return f"{values[f'p{percentile}']:.1f}" if values else "-"

    return (
        summary.level,
        f"{summary.ok}/{summary.requests}",
        f"{summary.requests_per_s:.2f}",
        f"{summary.input_tokens_per_s:.1f}",
        f"{summary.output_tokens_per_s:.1f}",
        at(summary.ttft_ms, 50),
        at(summary.ttft_ms, 99),
        at(summary.token_ms, 50),
        at(summary.token_ms, 99),
        at(summary.e2e_ms, 50),
        f"{100 * summary.goodput_share:.0f} %",
    )


def as_html(title: str, facts: dict[str, str], summaries: Sequence[Summary]) -> str:
    """A page with the facts of the run, a table of all loads and curves of latency over throughput."""
    curves = "".join(
        curve(f"{name} (ms) over output tokens/s", _percentile_lines(summaries, key))
        for name, key in (
            ("Time to first token", "ttft_ms"),
            ("Time between tokens", "inter_token_ms"),
            ("End to end", "e2e_ms"),
        )
    )
    return page(title, facts, details(summaries) + curves)


def _percentile_lines(summaries: Sequence[Summary], key: str) -> dict[str, list[tuple[float, float]]]:
    """Points of p50 and p99 over throughput."""
    found = [(summary.output_tokens_per_s, getattr(summary, key)) for summary in summaries]
    return {name: [(x, values[name]) for x, values in found if values] for name in ("p50", "p99")}


def page(title: str, facts: dict[str, str], body: str) -> str:
    """An HTML page with the facts of a run and a body below them."""
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in facts.items())
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>
<style>body{{font:14px/1.5 system-ui,sans-serif;margin:2rem;color:#111}}table{{border-collapse:collapse;margin:1rem 0}}
td,th{{border:1px solid #ddd;padding:.25rem .6rem;text-align:right}}svg{{margin:.5rem 1rem .5rem 0}}</style></head>
<body><h1>{escape(title)}</h1><table>{rows}</table><div>{body}</div></body></html>
"""


def details(summaries: Sequence[Summary]) -> str:
    """An HTML table of all percentiles, one row per load."""
    groups = (("TTFT", "ttft_ms"), ("between tokens", "inter_token_ms"), ("per token", "token_ms"), ("e2e", "e2e_ms"))
    head = "<th>load</th><th>ok</th><th>req/s</th><th>in tok/s</th><th>out tok/s</th><th>goodput/s</th><th>cost/M</th>"
    head += "".join(f"<th>{name} p{p}</th>" for name, _ in groups for p in PERCENTILES)
    lines = []
    for item in summaries:
        cost = item.cost_per_million_output_tokens
        cells = [
            item.level,
            f"{item.ok}/{item.requests}",
            f"{item.requests_per_s:.2f}",
            f"{item.input_tokens_per_s:.1f}",
        ]
        cells += [
            f"{item.output_tokens_per_s:.1f}",
            f"{item.goodput_per_s:.2f}",
            "-" if cost is None else f"{cost:.2f}",
        ]
        for _, key in groups:
            values = getattr(item, key)
            cells += [f"{values[f'p{p}']:.1f}" if values else "-" for p in PERCENTILES]
        lines.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    return f"<table><tr>{head}</tr>{''.join(lines)}</table><p>Times in milliseconds.</p>"


def curve(title: str, lines: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """Lines through points as SVG, on axes from 0; "" if there are no points. There must not be more lines than
    colours."""
    lines = {name: sorted(points) for name, points in lines.items() if points}
    if not lines:
        return ""
    right = max(x for points in lines.values() for x, _ in points) * 1.05 or 1.0
    top = max(y for points in lines.values() for _, y in points) * 1.05 or 1.0

    def place(x: float, y: float) -> str:
        return f"{_MARGIN + x / right * (_WIDTH - _MARGIN - 10):.1f},{_HEIGHT - 36 - y / top * (_HEIGHT - 66):.1f}"

    marks = [f'<text x="8" y="16" font-weight="600">{escape(title)}</text>']
    for share in (0.0, 0.5, 1.0):
        x, y = place(share * right, 0).split(","), place(0, share * top).split(",")
        marks.append(f'<text x="{x[0]}" y="{_HEIGHT - 16}" text-anchor="middle">{_tick(share * right)}</text>')
        marks.append(f'<text x="{_MARGIN - 6}" y="{y[1]}" text-anchor="end">{_tick(share * top)}</text>')
        marks.append(f'<line x1="{_MARGIN}" x2="{_WIDTH - 10}" y1="{y[1]}" y2="{y[1]}" stroke="#e5e7eb"/>')
    for colour, (name, points) in zip(_COLOURS, lines.items(), strict=False):
        spots = [place(*point) for point in points]
        marks.append(f'<polyline points="{" ".join(spots)}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for x, y in (spot.split(",") for spot in spots):
            marks.append(f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>')
        x, y = spots[-1].split(",")
        marks.append(f'<text x="{x}" y="{float(y) - 6:.1f}" fill="{colour}" text-anchor="end">{escape(name)}</text>')
    return f'<svg width="{_WIDTH}" height="{_HEIGHT}" font-size="11" role="img">{"".join(marks)}</svg>'


def _tick(value: float) -> str:
    return f"{value:.0f}" if value >= 10 or not value else f"{value:.2g}"

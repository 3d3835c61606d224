"""The figures that the parts of a visit measured, and their comparison with an earlier visit (gpu_visit.py --before).

Parts print rows as lines of JSON, or write them to their --out files. A row's figures are the numbers whose keys end as
in HIGHER or LOWER; its other texts and whole numbers form the figure's name. An answer is a row's "passed".
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HIGHER = ("tok_s", "tokens_per_s", "gb_s", "tflop_s")  # higher is better
LOWER = ("us", "_ms", "ms_per_step")
NOISE = 0.05  # two runs of the same objects on one machine differed by 3 %


@dataclass(frozen=True)
class Found:
    """The results of one part: figures by name, and whether answers were right, by name."""

    figures: Mapping[str, float] = field(default_factory=dict)
    answers: Mapping[str, bool] = field(default_factory=dict)


def found(log: str, files: Iterable[Path]) -> Found:
    """All results of a part. log: its output; files: its JSON files, of which missing ones are skipped."""
    figures: dict[str, float] = {}
    answers: dict[str, bool] = {}
    for row in _rows(log, files):
        name = _name(row)
        figures |= {f"{name} {key}".strip(): float(value) for key, value in row.items() if _measured(key, value)}
        if isinstance(row.get("passed"), bool):
            answers[name] = row["passed"]
    return Found(figures, answers)


def compared(now: Mapping[str, Any], before: Mapping[str, Any], noise: float = NOISE) -> list[str]:
    """A line for each figure that became slower by more than `noise`, each answer that changed, and each part that no
    longer passes, and a summary. now, before: parts as in visit.json."""
    lines, both = [], 0
    for part in (part for part in now if part in before):
        one, other = now[part], before[part]
        if other["status"] == "passed" and one["status"] in ("failed", "late"):
            lines.append(f"{part}: passed before, {one['status']} now")
        answers, known = one.get("answers", {}), other.get("answers", {})
        changed = [name for name in answers if name in known and answers[name] != known[name]]
        lines += [f"{part}: {name}: {_word(known[name])} before, {_word(answers[name])} now" for name in changed]
        figures, earlier = one.get("figures", {}), other.get("figures", {})
        for name in (name for name in figures if earlier.get(name, 0) > 0 and figures[name] > 0):
            both += 1
            slower = figures[name] / earlier[name] if name.endswith(LOWER) else earlier[name] / figures[name]
            if slower > 1 + noise:
                lines.append(
                    f"{part}: {name}: {earlier[name]:.4g} before, {figures[name]:.4g} now, {slower:.2f}x slower"
                )
    return [*lines, f"{both} figures compared, {100 * noise:.0f} % is noise"]


def _word(right: bool) -> str:
    return "right" if right else "wrong"


def _rows(log: str, files: Iterable[Path]) -> Iterable[dict[str, Any]]:
    for line in log.splitlines():
        if line.startswith("{"):
            yield from _read(line)
    for file in files:
        if file.is_file():
            yield from _read(file.read_text())


def _read(text: str) -> list[dict[str, Any]]:
    """The rows of a JSON text: one row, a list of rows, or a dict with "rows"; [] for any other text."""
    try:
        value = json.loads(text)
    except ValueError:
        return []
    rows = value.get("rows", [value]) if isinstance(value, dict) else value
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def _measured(key: str, value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and key.endswith((*HIGHER, *LOWER))


def _name(row: Mapping[str, Any]) -> str:
    """The name of a row's figures: its texts, and its whole numbers that are no figures."""
    kept = (v for k, v in row.items() if isinstance(v, str) or (type(v) is int and not _measured(k, v)))
    return " ".join(str(value) for value in kept)

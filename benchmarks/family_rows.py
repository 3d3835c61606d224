"""The results of `families.py`, one row for each model type, and their table."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

TOLERANCE = 2e-5
NOISE = 4.0
TOKENS = 21
TITLES = {
    "generate": "Causal-LM types",
    "see": "Types that see images and write text, for texts alone,",
    "embed": "Text encoders",
    "rerank": "Sequence classifiers",
}


@dataclasses.dataclass
class Row:
    """The result of one model type. `error` is the largest logit difference relative to the largest logit.

    walked: the date. pattern: its layers by kind. plan_error: the error of an interpreted GPU launch plan. noise: the
    distance of transformers' float32 logits from its float64 logits, if an error is above the tolerance. changed: the
    drawn changes.
    """

    model_type: str
    walked: str = ""
    pattern: str = ""
    built: bool = False
    traced: bool = False
    compiled: bool | None = None
    error: float | None = None
    engine_error: float | None = None
    plan_error: float | None = None
    noise: float | None = None
    changed: str = ""
    reason: str = ""
    seconds: float = 0.0

    @property
    def errors(self) -> list[float]:
        """The error of every comparison that was made."""
        return [e for e in (self.error, self.engine_error, self.plan_error) if e is not None]

    @property
    def equal(self) -> bool:
        """Whether every comparison that was made is within the tolerance."""
        return self.traced and bool(self.errors) and max(self.errors) <= self.limit

    @property
    def limit(self) -> float:
        """The largest error that counts as equal."""
        return max(TOLERANCE, NOISE * (self.noise or 0.0))

    def joined(self, earlier: Row | None) -> Row:
        """This row, with the comparisons that an earlier walk made and this one did not."""
        if earlier is None or not self.equal or not earlier.equal:
            return self
        made = {k: v for k, v in dataclasses.asdict(self).items() if v is not None and v != "" and v is not False}
        made["reason"] = self.reason
        return Row(**{**dataclasses.asdict(earlier), **made})


def markdown(rows: list[Row], versions: str, task: str) -> str:
    """The table and its counts."""
    mark = {True: "yes", False: "no", None: ""}
    count = f"{len(rows)} types: {sum(r.traced for r in rows)} traced, {sum(r.equal for r in rows)} with equal logits"
    compiled, planned = (
        sum(r.equal and e is not None for r, e in found)
        for found in (
            [(r, r.engine_error) for r in rows],
            [(r, r.plan_error) for r in rows],
        )
    )
    count += f"; of these {compiled} as CPU engines, {planned} as interpreted h100 plans"
    lines = [
        f"# {TITLES[task]} of transformers through icc",
        "",
        f"{versions}; one tiny random checkpoint each, with the layer pattern, the routing and the kinds of attention "
        f"of the type's published default configuration, {TOKENS} tokens, against eager float32 logits; error is the "
        f"largest difference over the largest logit, equal means at most {TOLERANCE:g}, or at most {NOISE:g} times "
        "the noise: how far transformers' float32 logits are from its float64 ones, worked out where the tolerance is "
        "exceeded (benchmarks/families.py).",
        "",
        f"{count}.",
        "",
        "Not every row was asked for an engine or a plan.",
        "",
        "| type | walked | layers | traced | equal | CPU engine | h100 plan | noise | refused, and why |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        errors = ["" if e is None else f"{e:.0e}" for e in (row.engine_error, row.plan_error, row.noise)]
        reason = row.reason.replace("|", "\\|")
        equal = f"{row.error:.0e}" if row.error is not None else ""
        cells = (row.model_type, row.walked, row.pattern, mark[row.traced], equal, *errors, reason)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def kept_rows(path: Path | None) -> dict[str, Row]:
    """The rows of an earlier walk by type, from its JSON file; {} if there is no file."""
    if path is None or not path.with_suffix(".json").exists():
        return {}
    return {row["model_type"]: Row(**row) for row in json.loads(path.with_suffix(".json").read_text())}


def write(rows: list[Row], path: Path, versions: str, task: str) -> None:
    """Write PATH.md and PATH.json."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".md").write_text(markdown(rows, versions, task))
    path.with_suffix(".json").write_text(json.dumps([dataclasses.asdict(r) for r in rows], indent=1) + "\n")

"""The sections "quantization" and "passes": the quality of stored weights, the rewrites, and the refused rules with
their reasons."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from .charts import colours, legend, lines
from .facts import OUTSIDE, EngineFacts, layer_of
from .html import NONE, Markup, el, table

_WORST = 12
_MEASURES = {
    "output_snr_db": "Error of the layers' outputs on the calibration text",
    "weight_snr_db": "Error of the stored weights",
}


def quantization_section(facts: EngineFacts) -> list[Markup]:
    """The signal-to-noise ratio of every quantized weight by layer, the worst of them, and the weights that were not
    quantized."""
    found = facts.manifest.quantization
    records: Sequence[Mapping[str, Any]] = facts.report.get("quantization", ())
    parts: list[Markup] = [el("p", f"{found.method}: {found.bits_per_weight:g} bits per weight, over all parameters.")]
    for key, title in _MEASURES.items():
        series: dict[str, list[tuple[float, float, str]]] = defaultdict(list)
        for record in records:
            if record.get(key) is not None and (layer := layer_of(record["name"])) != OUTSIDE:
                text = f"{record['name']}\n{record['format']}: {record[key]} dB"
                series[_kind(record["name"])].append((layer, record[key], text))
        if series:
            classes = colours(list(series))
            chart = lines(series, classes, lambda v: f"{v:g} dB", "layer", "SNR, more is better", least=4.0)
            parts += [el("h3", title), chart, legend(classes)]
    if records:
        parts += [el("h3", "The least exact"), _worst(records)]
    kept = found.kept or ["nothing: every linear is quantized"] if records else []
    if kept:
        parts += [el("h3", "Kept as it was"), el("ul", [el("li", line) for line in kept])]
    return parts


def _kind(name: str) -> str:
    """A weight's name without its layer, such as self_attn.q_proj."""
    return re.sub(r"^.*?\.\d+\.", "", name).removesuffix(".weight")


def _worst(records: Sequence[Mapping[str, Any]]) -> Markup:
    def error(record: Mapping[str, Any]) -> float:
        value = record.get("output_snr_db")
        return record["weight_snr_db"] if value is None else value

    rows = [
        [el("code", r["name"]), el("code", r["format"]), r["method"], f"{r['weight_snr_db']:.2f}",
         NONE if r.get("output_snr_db") is None else f"{r['output_snr_db']:.2f}"]
        for r in sorted(records, key=error)[:_WORST]
    ]  # fmt: skip
    return table(["weight", "format", "method", "weight SNR, dB", "output SNR, dB"], rows)


def passes_section(facts: EngineFacts) -> list[Markup]:
    """The rewrites of every pass, the number of calls after it, and why rules did not fire."""
    rows, refused, before = [], [], None
    for found in facts.report.get("passes", ()):
        calls = found.get("calls")
        change = "" if calls is None or before is None or calls == before else f"{calls - before:+d}"
        before = calls if calls is not None else before
        counts = ", ".join(f"{name} {number}" for name, number in found["counts"].items()) or NONE
        refusals = found["refusals"]
        rows.append([found.get("phase", ""), el("code", found["name"]), counts, calls, change, len(refusals) or None])
        if refusals:
            refused.append(_refusals(found["name"], refusals))
    parts = [table(["phase", "pass", "rewrites", "calls after", "change", "refused"], rows, "passes")]
    parts.append(el("h3", "Refused, and why"))
    parts += refused or [el("p", "no rule that nearly fired was refused")]
    return parts


def _refusals(name: str, refusals: Sequence[Mapping[str, str]]) -> Markup:
    reasons = Counter((r["rule"], r["reason"]) for r in refusals)
    places: dict[tuple[str, str], list[str]] = defaultdict(list)
    for refusal in refusals:
        places[refusal["rule"], refusal["reason"]].append(refusal["node"])
    rows = [
        [el("code", rule), reason, number, el("span", ", ".join(places[rule, reason]), class_="places")]
        for (rule, reason), number in reasons.most_common()
    ]
    summary = el("summary", el("code", name), f" {len(refusals)} times")
    return el("details", summary, table(["rule", "reason", "times", "where"], rows), open=True)


def extra_sections(facts: EngineFacts) -> list[tuple[str, str, list[Markup]]]:
    """(id, title, parts) of sections that only some engines have: kernel objects of a GPU, speculation, tuned
    products."""
    found: list[tuple[str, str, list[Markup]]] = []
    if objects := facts.report.get("objects"):
        head = ["object", "kernels", "warps", "registers", "spilled, B", "shared, B", "occupancy", "faults"]
        rows = [
            [el("code", o["object"]), ", ".join(o["kernels"]), *(_known(o[k]) for k in _RESOURCES),
             NONE if o["occupancy"] < 0 else f"{100 * o['occupancy']:.0f} %", o.get("faults") or "none"]
            for o in objects
        ]  # fmt: skip
        found.append(("objects", "Kernel objects", [table(head, rows)]))
    if speculation := facts.report.get("speculation"):
        found.append(("speculation", "Speculation", [el("div", _facts_of(speculation))]))
    if refused := facts.report.get("refused"):
        found.append(("refused", "Refused tilings", [el("ul", [el("li", line) for line in refused])]))
    if tuned := facts.report.get("tuned"):
        found.append(("tuned", "Tuned", [el("ul", [el("li", line) for line in tuned])]))
    return found


_RESOURCES = ("warps", "registers", "spill_bytes", "shared_bytes")


def _known(value: int) -> object:
    return NONE if value < 0 else value


def _facts_of(value: Any) -> Markup | str:
    """Nested facts as nested lists."""
    if isinstance(value, Mapping):
        return el("dl", [el("div", el("dt", name), el("dd", _facts_of(part))) for name, part in value.items()])
    if isinstance(value, list) and any(isinstance(part, Mapping) for part in value):
        return el("ol", [el("li", _facts_of(part)) for part in value])
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)

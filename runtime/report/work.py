"""The sections "roofline" and "memory": the time of a step on the target, by op and by layer, and the engine's
memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from ..format.elements import ITEM_SIZE
from ..format.kv import KVMemory
from ..format.roofline import Roofline
from .charts import Frame, byte_ticks, colours, legend, stacks, ticks
from .facts import OUTSIDE, EngineFacts, layer_of
from .html import Markup, count, el, seconds, size, table

_STEP_PIXELS = 5.0
_KINDS = {"decode": "decode, one token", "prefill_512": "prefill, 512 tokens"}


def roofline_section(facts: EngineFacts) -> list[Markup]:
    """The least time of a step on the target: by op on a roofline, by layer in bars, and as numbers."""
    found: Mapping[str, Any] = facts.report.get("roofline", {})
    if not found:
        return [el("p", "report.json tells of none")]
    ops = sorted({row["op"] for rows in found.values() for row in rows}, key=lambda op: -_seconds_of(found, op))
    classes = colours(ops)
    parts: list[Markup] = []
    assumed = facts.manifest.backend == "cpu"
    if machine := facts.report.get("machine"):
        whose = "a CPU that is assumed: it tells shares, not times" if assumed else facts.manifest.target
        note = f"{machine['bandwidth']:g} GB/s and {machine['peak_f16']:g} TFLOP/s of {whose}"
        parts.append(el("p", f"The least time that each op needs at {note}. Nothing here was measured.", class_="note"))
        parts += [_roof(found, machine, classes), legend(classes)]
    for kind, rows in found.items():
        whole = sum(row["seconds"] for row in rows) or 1.0
        title = f"{seconds(whole)} on the CPU that is assumed" if assumed else f"at least {seconds(whole)}"
        parts.append(el("h3", f"{_KINDS.get(kind, kind)}: {title}"))
        if layers := facts.report.get("roofline_layers", {}).get(kind):
            parts.append(stacks(_bars(layers), classes, seconds, "time"))
        parts.append(_costs(rows, whole, facts.report.get("machine")))
    return parts


def _seconds_of(found: Mapping[str, Any], op: str) -> float:
    return sum(row["seconds"] for rows in found.values() for row in rows if row["op"] == op)


def _bars(layers: Sequence[Mapping[str, Any]]) -> list[tuple[str, dict[str, float]]]:
    """One bar per layer, and one for all ops outside the layers."""
    bars: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for group in layers:
        for layer in group["layers"] or [OUTSIDE]:
            for row in group["rows"]:
                bars[layer][row["op"]] += row["seconds"]
    ordered = sorted(bars, key=lambda layer: (layer == OUTSIDE, layer))
    return [("rest" if layer == OUTSIDE else str(layer), bars[layer]) for layer in ordered]


def _costs(rows: Sequence[Mapping[str, Any]], whole: float, machine: Mapping[str, float] | None) -> Markup:
    lines = []
    for row in sorted(rows, key=lambda row: -row["seconds"]):
        share = 100 * row["seconds"] / whole
        bar = el("span", el("i", style=f"width:{share:.1f}%"), class_="share")
        intensity = row["flops"] / row["bytes"] if row["bytes"] else 0.0
        bound = "" if machine is None else "memory" if intensity < _roofline(machine).ridge else "arithmetic"
        lines.append([el("code", row["op"]), row["calls"], count(row["flops"]), size(row["bytes"]), f"{intensity:.3g}",
                      bound, seconds(row["seconds"]), bar, f"{share:.1f} %"])  # fmt: skip
    head = ["op", "calls", "FLOP", "moved", "FLOP/byte", "bound by", "least time", "", "share"]
    return table(head, lines)


def _roofline(machine: Mapping[str, float]) -> Roofline:
    """The target's roofline, from the report's GB/s and TFLOP/s."""
    return Roofline(machine["bandwidth"] * 1e9, machine["peak_f16"] * 1e12)


def _roof(found: Mapping[str, Any], machine: Mapping[str, float], classes: Mapping[str, str]) -> Markup:
    """The ops of each kind of step under the roof: FLOP per byte against FLOP/s; their area is their share of the
    time."""
    rows = [(kind, row) for kind, rows in found.items() for row in rows if row["flops"] and row["bytes"]]
    limits = _roofline(machine)
    peak, ridge = limits.rate, limits.ridge
    at = [row["flops"] / row["bytes"] for _, row in rows] or [1.0]
    low, high = min(*at, ridge, 0.05) / 2, max(*at, ridge) * 3
    floor = limits.attainable(low)  # left of the ridge
    frame = Frame.logarithmic(960, 380, (low, high), (floor / 1.5, peak * 2.5))
    powers = [10.0**n for n in range(-4, 20)]
    x_marks = [p for p in powers if low <= p <= high]
    y_marks = [p for p in powers if floor / 1.5 <= p <= peak * 2.5]
    corner = (frame.x(ridge), frame.y(peak))
    roof = f"M{frame.x(low)} {frame.y(floor)}L{corner[0]} {corner[1]}L{frame.x(high)} {corner[1]}"
    points = []
    for kind, row in rows:
        intensity = row["flops"] / row["bytes"]
        reached = row["flops"] / row["seconds"] if row["seconds"] else 0.0
        share = row["seconds"] / (sum(other["seconds"] for other in found[kind]) or 1)
        radius = 4 + 18 * share**0.5
        text = (
            f"{row['op']}, {_KINDS.get(kind, kind)}\n{intensity:.3g} FLOP/byte, {100 * share:.1f} % of the step, "
            f"{count(reached)}FLOP/s at most"
        )
        shape = {"cx": frame.x(intensity), "cy": frame.y(max(reached, 1.0)), "r": round(radius, 1)}
        hollow = "hollow " if kind != "decode" else ""
        points.append(el("circle", el("title", text), class_=f"{hollow}{classes[row['op']]}", **shape))
    note = el("text", f"{count(peak)}FLOP/s", class_="roof", x=frame.width - 20, y=corner[1] - 8, text_anchor="end")
    grid = [frame.rows(y_marks, lambda v: f"{count(v)}"), frame.columns(x_marks, lambda v: f"{v:g}", lines=True)]
    titles = frame.titles("FLOP per byte moved (filled: decode, hollow: prefill; area: share of time)", "FLOP/s")
    return frame.svg(grid, el("path", class_="roof", d=roof), note, points, titles, label="roofline of the ops")


def memory_section(facts: EngineFacts) -> list[Markup]:
    """The engine's memory, the arena over the steps, and the weights by layer."""
    program, limits = facts.program, facts.manifest.limits
    weights = sum(weight.nbytes for weight in program.stored.values())
    blocks = program.kv.blocks_needed(limits, limits.max_batch_size)
    kept = KVMemory(program.kv, blocks).nbytes if program.kv.groups else 0
    arena = program.arena_bytes_per_token * limits.max_step_tokens
    tokens = f"{program.arena_bytes_per_token} B per token of a step of up to {limits.max_step_tokens}"
    rows = [
        ["weights", size(weights), f"{facts.manifest.quantization.bits_per_weight:g} bits per weight"],
        ["KV cache", size(kept), f"{limits.max_batch_size} sequences of {limits.max_seq_len}, "
         f"{program.kv.bytes_per_token():g} B per token"],
        ["arena", size(arena), tokens],
    ]  # fmt: skip
    if program.plan is not None:
        rows.append(["scratch", size(program.plan.scratch_bytes), "of kernels"])
    return [
        table(["what", "most", "which is"], rows),
        el("h3", "The arena over the steps of the program"),
        _arena(facts),
        el("h3", "Weights by layer and format"),
        *_weights(facts),
    ]


def _arena(facts: EngineFacts) -> Markup:
    """Every buffer as a box, from the step that writes it to the last that reads it, at its place in the arena."""
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for step in facts.steps:
        for name in step.buffers:
            first.setdefault(name, step.number)
            last[name] = step.number
    spans = [
        (buffer, first[buffer.name], last[buffer.name], prod(buffer.shape) * ITEM_SIZE[buffer.dtype])
        for buffer in facts.program.buffers
        if buffer.name in first
    ]
    steps, high = len(facts.steps), max([facts.program.arena_bytes_per_token, *(b.offset + n for b, _, _, n in spans)])
    width = max(960.0, min(_STEP_PIXELS * steps, 8000.0))
    frame = Frame.linear(width, 320, (0, max(steps, 1)), (0, max(high, 1)))
    classes = colours(sorted({facts.steps[begin].op for _, begin, _, _ in spans}))
    boxes = []
    for buffer, begin, end, nbytes in spans:
        op = facts.steps[begin].op
        text = f"{buffer.name}, of step {begin} ({op}), to step {end}\n{nbytes} B per {_ROWS.get(buffer.rows, 'row')}"
        box = {
            "x": frame.x(begin),
            "y": frame.y(buffer.offset + nbytes),
            "width": round(frame.x(end + 1) - frame.x(begin), 1),
            "height": round(max(frame.y(buffer.offset) - frame.y(buffer.offset + nbytes), 0.5), 1),
        }
        boxes.append(el("rect", el("title", text), class_=f"box {classes[op]}", **box))
    live = [sum(n for _, begin, end, n in spans if begin <= step <= end) for step in range(steps)]
    path = "M" + "L".join(f"{frame.x(n)} {frame.y(v)}L{frame.x(n + 1)} {frame.y(v)}" for n, v in enumerate(live))
    most = max(live, default=0)
    chart = frame.svg(
        frame.rows([mark for mark in byte_ticks(high) if mark <= high], size),
        frame.columns(ticks(0, max(steps, 1), int(width / 96))[:-1], lambda v: f"{v:.0f}"),
        boxes, el("path", class_="live", d=path) if live else None,
        frame.titles("step", "bytes per token"), label="arena over the steps",
    )  # fmt: skip
    packed = f"{size(high)} per token, {size(most)} of it live at once ({100 * most / (high or 1):.0f} %: the line)"
    return el("div", chart, legend(classes), el("p", packed, class_="note"))


_ROWS = {"tokens": "token", "logit_rows": "row of logits"}


def _weights(facts: EngineFacts) -> list[Markup]:
    """The bytes of the packed weights, by format, per layer and in total."""
    layers: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    totals: dict[str, list[float]] = defaultdict(lambda: [0, 0, 0])
    for name, weight in facts.program.stored.items():
        layers[layer_of(name)][weight.format] += weight.nbytes
        total = totals[weight.format]
        total[0] += 1
        total[1] += prod(weight.shape)
        total[2] += weight.nbytes
    names = sorted(totals, key=lambda name: -totals[name][2])
    ordered = sorted(layers, key=lambda layer: (layer == OUTSIDE, layer))
    bars = [("rest" if layer == OUTSIDE else str(layer), layers[layer]) for layer in ordered]
    whole = sum(total[2] for total in totals.values()) or 1
    rows = [
        [
            el("code", n),
            int(t[0]),
            count(t[1]),
            size(t[2]),
            f"{8 * t[2] / (t[1] or 1):.2f}",
            f"{100 * t[2] / whole:.1f} %",
        ]
        for n, t in ((name, totals[name]) for name in names)
    ]
    classes = colours(names)
    head = ["format", "weights", "values", "bytes", "bits per value", "share"]
    return [stacks(bars, classes, size, "bytes"), legend(classes), table(head, rows)]

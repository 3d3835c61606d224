"""The report of an engine as one self-contained HTML page, without external scripts, fonts or pictures."""

from __future__ import annotations

import base64
import hashlib
from pkgutil import get_data

from ..format.roofline import Roofline
from .facts import OUTSIDE, EngineFacts, decode_bytes, decode_rows
from .html import Markup, count, el, seconds, size
from .passes import extra_sections, passes_section, quantization_section
from .stages import graph_section
from .work import memory_section, roofline_section


def report_page(facts: EngineFacts, bandwidth: float | None = None) -> str:
    """The page. bandwidth: GB/s at which this host reads as many bytes as a decode step; None if it was not measured.
    Apart from this the page depends only on the engine."""
    sections = [
        ("graph", "The graph by stage", graph_section(facts)),
        ("roofline", "Roofline", roofline_section(facts)),
        ("memory", "Memory", memory_section(facts)),
        ("quantization", "Quantization", quantization_section(facts)),
        ("passes", "Fused and refused", passes_section(facts)),
        *extra_sections(facts),
    ]
    contents = el("nav", [el("a", title, href=f"#{name}") for name, title, _ in sections], aria_label="Sections")
    body = [el("section", el("h2", title), parts, id=name) for name, title, parts in sections]
    style, script = (Markup(_beside(name)) for name in ("report.css", "report.js"))
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src '{_digest(script)}'"
    head = [
        el("meta", charset="utf-8"),
        el("meta", http_equiv="Content-Security-Policy", content=policy),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("title", f"{facts.name}: what icc did"),
        el("style", style),
    ]
    tip = el("div", id="tip", hidden=True, role="tooltip")
    main = el("main", _title(facts), _overview(facts, bandwidth), body)
    page = el("html", el("head", head), el("body", contents, main, tip, el("script", script)), lang="en")
    return f"<!doctype html>\n{page}\n"


def _beside(name: str) -> str:
    """The text of a file of this package, which may be in an archive."""
    content = get_data(__name__.rpartition(".")[0], name)
    assert content is not None
    return content.decode()


def _digest(script: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _title(facts: EngineFacts) -> Markup:
    manifest = facts.manifest
    what = f"{manifest.model.architecture}, {manifest.quantization.method}, for {manifest.target}"
    return el("header", el("h1", facts.name), el("p", f"{what}; icc {manifest.icc_version}"))


def _overview(facts: EngineFacts, bandwidth: float | None) -> Markup:
    """The most important figures."""
    manifest, program = facts.manifest, facts.program
    limits = manifest.limits
    cards = [
        ("parameters", count(manifest.model.num_parameters), f"{manifest.model.num_layers} layers"),
        ("weights", size(sum(w.nbytes for w in program.stored.values())),
         f"{manifest.quantization.bits_per_weight:g} bits per weight"),
        ("engine", size(sum(entry.size for entry in manifest.files.values())), f"{len(manifest.files)} files"),
        ("program", f"{len(facts.steps)} steps", f"{len(program.kernels)} kernels"),
        ("KV cache", f"{size(program.kv.bytes_per_token())} per token", _groups(facts)),
        ("limits", f"{limits.max_seq_len} tokens",
         f"{limits.max_batch_size} sequences, steps of {limits.max_step_tokens}"),
    ]  # fmt: skip
    if (decode := _decode_seconds(facts, bandwidth)) and manifest.embedding is None:
        note = f"{seconds(decode)} for a token of one sequence"
        note += f", at {bandwidth:.0f} GB/s of this host" if bandwidth else ""
        cards.append(("at the limit", f"{count(1 / decode)} tokens/s", note))
    items = [el("div", el("dt", name), el("dd", value), el("small", note)) for name, value, note in cards]
    return el("dl", items, class_="cards")


def _decode_seconds(facts: EngineFacts, bandwidth: float | None) -> float:
    """The least time in seconds of a decode step of one sequence; 0.0 if it is not known, for example for an unknown
    CPU."""
    if bandwidth:
        return Roofline(bandwidth * 1e9).memory_seconds(decode_bytes(facts))
    return 0.0 if facts.manifest.backend == "cpu" else sum(row["seconds"] for row in decode_rows(facts))


def _groups(facts: EngineFacts) -> str:
    """A text about the tokens that the groups of the KV cache keep."""
    groups = facts.program.kv.groups
    kept = [f"{g.dtype}, {f'{g.keeps} of {g.size}' if g.size and g.keeps != 'state' else g.keeps}" for g in groups]
    return "; ".join(dict.fromkeys(kept)) or ("none" if facts.num_layers == OUTSIDE + 1 else "no groups")

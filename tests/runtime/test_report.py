"""The report of an engine: the sources of its figures, and that the page loads nothing else."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest
from icc.runtime.errors import EngineFormatError, UsageError
from icc.runtime.format.manifest import FileEntry
from icc.runtime.report import charts, graph
from icc.runtime.report.facts import OUTSIDE, _steps, layer_of, read_facts
from icc.runtime.report.html import Markup, count, el, seconds, size, table
from icc.runtime.report.page import report_page
from icc.runtime.report.stages import _parsed, layers_text
from icc.runtime.report.write import write_report


class Checked(HTMLParser):
    """Fails if an element is not closed, or closed twice; counts the elements by tag."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: dict[str, int] = {}
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.open.append(tag)
        self.seen[tag] = self.seen.get(tag, 0) + 1

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.seen[tag] = self.seen.get(tag, 0) + 1

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def self_contained(page: str) -> Checked:
    """Check that the page loads nothing and that its policy forbids it, and return its elements."""
    assert "default-src &#x27;none&#x27;" in page
    assert not re.search(r"(?:src|href)=\"(?!#)|@import|url\(|https?://", page)
    return Checked(page)


def test_text_is_escaped_and_numbers_are_short() -> None:
    assert el("p", "<b>&", Markup("<i>x</i>"), None, class_='a"b', hidden=True) == (
        '<p class="a&quot;b" hidden>&lt;b&gt;&amp;<i>x</i></p>'
    )
    assert el("rect", el("title", "t"), x=1.50) == '<rect x="1.5"><title>t</title></rect>'
    assert [size(n) for n in (0, 1023, 1536, 790204992)] == ["0 B", "1023 B", "1.50 KiB", "754 MiB"]
    assert [seconds(n) for n in (0, 3e-9, 2.5e-5, 0.5, 12)] == ["0 s", "3 ns", "25 µs", "500 ms", "12 s"]
    assert [count(n) for n in (17, 45_678, 1.235e9)] == ["17", "45.7 k", "1.24 G"]
    shown = table(["name", "bytes"], [["a", "1.50 KiB"], ["b", "\u2013"]])
    assert shown.count('class="n"') == 3 and Checked(shown).seen["tr"] == 3


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 0.037), (18.6, 20.1), (0, 12345), (5, 5)])
def test_ticks_are_round_and_hold_what_is_drawn(low: float, high: float) -> None:
    marks = charts.ticks(low, high)
    assert marks[0] <= low and marks[-1] >= high and 2 <= len(marks) <= 8
    assert charts.byte_ticks(3 * 1024)[1] % 256 == 0


def test_layers_are_told_by_names() -> None:
    names = {"model.layers.12.mlp.up.weight+model.layers.12.x": 12, "h.3": 3, "lm_head.weight": OUTSIDE}
    assert {name: layer_of(name) for name in names} == names
    assert layers_text([0, 1, 2, 5]) == "layers 0 to 2, 5" and layers_text([4]) == "layer 4"


def test_a_step_without_a_weight_is_of_the_layer_of_the_next() -> None:
    def operand(space: str, name: str) -> dict[str, str]:
        return {"space": space, "name": name}

    raw = [
        {"op": "embedding", "table": operand("weight", "embed"), "y": operand("buffer", "b0")},
        {"op": "quantize", "x": operand("buffer", "b0"), "parts": [operand("buffer", "b1"), operand("buffer", "b2")]},
        {
            "op": "linear",
            "x": {"space": "quantized", "codes": operand("buffer", "b1")},
            "w": operand("weight", "l.0.w"),
        },
        {"op": "attention", "layer": 0, "cos": operand("weight", "table.7")},
        {"op": "norm", "w": operand("weight", "norm"), "x": operand("buffer", "b0")},
        {"op": "last", "x": operand("buffer", "b0"), "n": 3},
    ]
    found = list(_steps(raw))
    assert [step.layer for step in found] == [OUTSIDE, 0, 0, 0, OUTSIDE, OUTSIDE]
    assert found[1].buffers == ("b0", "b1", "b2") and found[2].weights == ("l.0.w",) and found[5].facts["n"] == 3


def test_a_layers_text_is_read_as_a_graph_that_is_drawn_without_overlap() -> None:
    lines = [
        "%0 = icc.rms_norm(%in, @norm.weight:f32[8], 1e-06): f32[T, 8]  # norm",
        "%1 = icc.linear(%0, @q.weight+k.weight:q4g128[16, 8], None): f32[T, 16]  # q",
        "%2 = aten.slice.Tensor(%1, 1, 0, 8, 1): f32[T, 8]",
        "%3 = icc.split(%1): (f32[T, 8], f32[T, 8])",
        "%4 = icc.pointwise([%2, %3, %0], t0 = mul a0 a1): f32[T, 8]  # mlp",
    ]
    nodes = list(_parsed(lines))
    assert [node.inputs for node in nodes] == [(), (0,), (1,), (1,), (2, 3, 0)]
    assert nodes[1].label == "linear q4g128" and "q.weight+k q4g128" in nodes[1].title and "mlp" in nodes[4].title
    drawing = graph.draw(nodes, "a layer")
    boxes = [
        tuple(map(float, box)) for box in re.findall(r'<rect[^>]*x="([\d.-]+)" y="([\d.-]+)" width="([\d.]+)"', drawing)
    ]
    assert len(boxes) == 5 and Checked(drawing).seen["path"] == 6
    for i, (x, y, width) in enumerate(boxes):
        for other, above, _ in boxes[:i]:
            assert y != above or other >= x + width or x >= other + 1


def test_the_page_of_an_engine_that_tells_little(make_engine: Callable[..., Path], tmp_path: Path) -> None:
    """An engine without report.json, such as one of an earlier version: the report shows what the program contains."""
    engine = make_engine("odd <name>.engine")
    file = tmp_path / "report.html"
    written = write_report(engine, file)
    page = file.read_text()
    assert written == len(page.encode()) and "odd &lt;name&gt;.engine" in page and "<name>" not in page
    assert self_contained(page).seen["section"] == 5
    assert report_page(read_facts(engine)) == page
    with pytest.raises(UsageError, match="cannot be written"):
        write_report(engine, tmp_path / "nowhere" / "report.html")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [engine.name, "report.html"]


def test_the_limit_is_of_a_known_gpu_or_measured_or_not_shown(
    make_engine: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bandwidth of a CPU is measured, which is possible for this machine only."""
    row = {"op": "linear", "calls": 1, "flops": 10, "bytes": 4e6, "seconds": 0.001}
    report = {"roofline": {"decode": [row]}, "machine": {"bandwidth": 4.0, "peak_f16": 1.0, "peak_i8": 1.0}}
    asked: list[int] = []

    def measured(nbytes: int) -> float:
        asked.append(nbytes)
        return 40.0

    monkeypatch.setattr("icc.runtime.executor.cpu.bandwidth.read_bandwidth", measured)
    pages: dict[str, str] = {}
    for target, backend in (("cpu", "cpu"), ("native", "cpu"), ("h100", "cuda")):
        facts = read_facts(make_engine(f"{target}.engine"))
        manifest = msgspec.structs.replace(facts.manifest, target=target, backend=backend)
        told = replace(facts, manifest=manifest, report=report)
        monkeypatch.setattr("icc.runtime.report.write.read_facts", lambda engine, told=told: told)
        write_report(target, tmp_path / "report.html")
        pages[target] = (tmp_path / "report.html").read_text()
    assert asked == [4_000_000] and isinstance(asked[0], int)
    assert "at the limit" not in pages["cpu"] and "a CPU that is assumed" in pages["cpu"]
    assert "<dd>10 k tokens/s</dd>" in pages["native"] and "100 µs" in pages["native"]
    assert "at 40 GB/s of this host" in pages["native"] and "a CPU that is assumed" in pages["native"]
    assert "<dd>1000 tokens/s</dd>" in pages["h100"] and "1 TFLOP/s of h100" in pages["h100"]
    assert "assumed" not in pages["h100"] and "at least 1 ms" in pages["h100"] and "at least" not in pages["cpu"]


def test_a_damaged_report_is_told_of(make_engine: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    from icc.runtime.report import facts

    real = facts.EngineFiles.read
    monkeypatch.setattr(
        facts.EngineFiles, "read", lambda self, name: b"{" if name == "report.json" else real(self, name)
    )
    manifest = facts.read_manifest(engine)
    listed = msgspec.structs.replace(manifest, files={**manifest.files, "report.json": FileEntry(1, "")})
    monkeypatch.setattr(facts, "read_manifest", lambda root: listed)
    with pytest.raises(EngineFormatError, match=r"report\.json"):
        read_facts(engine)

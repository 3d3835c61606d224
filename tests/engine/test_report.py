"""report.json of compiled engines, and the page that `icc report` makes from it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from browser import CHROMIUM, NO_CHROMIUM, browsing

pytestmark = pytest.mark.slow
SECTIONS = ("graph", "roofline", "memory", "quantization", "passes")


def test_the_report_tells_of_every_stage_and_layer(compiled: Callable[..., Any]) -> None:
    report = json.loads((compiled("llama", quant="rtn4").engine / "report.json").read_text())
    stages = report["stages"]
    assert [stage["name"] for stage in stages] == ["trace", "canonicalize", "quantize", "attention", "fuse"]
    layers = {number for kind in stages[0]["kinds"] for number in kind["layers"]}
    for stage in stages:
        assert stage["calls"] == sum(stage["ops"].values())
        assert sorted(n for kind in stage["kinds"] for n in kind["layers"]) == sorted(layers)
    assert any("icc.attention" in line for kind in stages[0]["kinds"] for line in kind["graph"])
    assert any("q4g" in line for kind in stages[2]["kinds"] for line in kind["graph"])
    phases = [found["phase"] for found in report["passes"]]
    assert phases == sorted(phases, key=["canonicalize", "quantize", "attention", "fuse", "lower"].index)
    of_graph = [found for found in report["passes"] if found["phase"] != "lower"]
    assert of_graph[-1]["calls"] == stages[-1]["calls"] and report["passes"][-1]["calls"] == report["steps"]
    for kind, rows in report["roofline"].items():
        total: dict[str, float] = {}
        for group in report["roofline_layers"][kind]:
            for row in group["rows"]:
                total[row["op"]] = total.get(row["op"], 0) + row["bytes"] * (len(group["layers"]) or 1)
        assert total == pytest.approx({row["op"]: row["bytes"] for row in rows})


def test_an_engine_reports_itself_without_icc(compiled: Callable[..., Any], tmp_path: Path) -> None:
    engine = compiled("llama", quant="rtn4").engine
    file = tmp_path / "report.html"
    done = subprocess.run([sys.executable, "-P", engine, "report", "--html", file], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    page = file.read_text()
    assert "self_attn.q_proj" in page and "fuse-add-norm" in page
    assert all(f'<section id="{name}">' in page for name in SECTIONS)
    if CHROMIUM is None:
        pytest.skip(NO_CHROMIUM)
    with browsing(tmp_path / "profile") as browser:
        for phone in (False, True):
            browser.look(phone=phone, dark=phone)
            browser.open(file.as_uri(), "document.readyState === 'complete'")
            assert browser.value("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
            assert browser.value("document.querySelectorAll('svg.graph').length") >= 4
            assert browser.value("document.querySelectorAll('svg.chart').length") >= 6
        browser.value(
            "document.querySelector('.graph g').dispatchEvent(new PointerEvent('pointermove', {bubbles: true}))"
        )
        assert "icc.rms_norm" in browser.text("#tip") or "f32[T" in browser.text("#tip")
        assert browser.problems() == [] and browser.requested() == [file.as_uri()] * 2

"""The one formula for the minimal time of work, and that it is not repeated elsewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from icc.compiler.targets import TARGETS
from icc.runtime.format.roofline import Roofline

ROOT = Path(__file__).resolve().parents[2]


def test_the_larger_of_reading_and_computing_counts() -> None:
    roof = Roofline(bandwidth=100.0, rate=1000.0)
    assert roof.ridge == 10.0
    assert roof.seconds(50, 400) == roof.memory_seconds(50) == 0.5
    assert roof.seconds(50, 600) == roof.arithmetic_seconds(600) == 0.6
    assert (roof.attainable(2.0), roof.attainable(20.0)) == (200.0, 1000.0)
    assert roof.among(4).seconds(50, 400) == 2.0
    assert Roofline(100.0).seconds(50, 1e30) == 0.5  # a machine with an unknown rate


def test_targets_give_theirs_in_bytes_and_flops() -> None:
    h100 = TARGETS["h100"]
    half, eight = h100.roofline(), h100.roofline(eight=True, share=0.5, memory=0.25)
    assert half == Roofline(h100.bandwidth * 1e9, h100.peak_f16 * 1e12)
    assert eight.rate == pytest.approx(0.5e12 * h100.peak_i8)
    assert eight.bandwidth == pytest.approx(0.25e9 * h100.bandwidth)


def test_nobody_divides_by_a_targets_figures() -> None:
    """The compiler's cost models and reports use `Target.roofline`."""
    names = r"\.(bandwidth|peak_f16|peak_i8)\b"
    figure = re.compile(rf"{names}.*\de(9|12)\b|\de(9|12)\b.*{names}")
    assert figure.search("0.93e9 * self.target.bandwidth") and figure.search("(target.peak_f16 * 1e12)")
    sources = [path for path in (ROOT / "compiler").rglob("*.py") if path.name != "targets.py"]
    assert [str(path) for path in sources if figure.search(path.read_text())] == []

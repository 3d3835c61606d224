"""The golden texts of golden/<pass>/: `icc opt` prints each file as it is.

A file holds a comment, the graph before, the passes, the graph after, how often each rewrite was applied and why others
were refused. The command also compares the logits before and after within what the passes allow, and runs each pass
twice. After an intended change of a pass or the printer, write the files again and review the diff like code:

    EXPECTTEST_ACCEPT=1 python -m pytest tests/passes/test_golden.py
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner
from icc.compiler.cli import main
from icc.compiler.graph.parser import parse_graph
from icc.compiler.graph.printer import print_graph
from icc.compiler.opt import GraphFile
from icc.passes.registry import PASSES, parse_passes

FOLDER = Path(__file__).with_name("golden")
CASES = sorted(FOLDER.glob("*/*.txt"))
# heads are weights of another checkpoint; calibrated passes give different numbers on each machine; text cannot express
# reordered columns of weights; a rotation changes the weights of a whole model, not the text
NOT_TEXT = {
    "insert-medusa-heads", "quantize-auto", "quantize-awq", "quantize-gptq", "quantize-smooth", "rotate",
    "sort-columns",
}  # fmt: skip


@pytest.mark.parametrize("path", CASES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_icc_opt_prints_the_file(path: Path) -> None:
    text = path.read_text()
    result = CliRunner().invoke(main, ["opt", str(path), "--verify", "--run"], catch_exceptions=False)
    assert result.exit_code == 0, result.stderr
    if os.environ.get("EXPECTTEST_ACCEPT"):
        path.write_text(result.stdout)
    else:
        assert result.stdout == text
    assert "logits differ by" in result.stderr


@pytest.mark.parametrize("path", CASES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_both_graphs_read_back(path: Path) -> None:
    file = GraphFile.parse(path.read_text())
    after = "".join(line for line in file.after.splitlines(keepends=True) if not line.startswith("#"))
    for text in (file.before, after):
        assert print_graph(parse_graph(text)) == text
    assert [item.name for item in parse_passes(file.passes)][-1] == path.parent.name
    assert file.comment.startswith("# ")


def test_every_pass_has_a_golden_text() -> None:
    assert {path.parent.name for path in CASES} == set(PASSES) - NOT_TEXT

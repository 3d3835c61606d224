"""A soak that stops in the middle of a file continues there; see soak.py and passed.py."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import soak

FILE = "tests/packaging/test_public_names.py"


def test_tests_that_have_passed_are_left_out(tmp_path: Path) -> None:
    listed = [sys.executable, "-m", "pytest", "-q", "--collect-only", FILE]
    text = subprocess.run(listed, cwd=soak.ROOT, capture_output=True, text=True, check=True).stdout
    names = re.findall(rf"^{FILE}::.*$", text, re.MULTILINE)
    assert len(names) > 1
    stopped = soak.run(FILE, names[1:], 0, tmp_path)
    assert stopped["result"] == "unfinished" and stopped["ids"] == names[1:]
    whole = soak.run(FILE, names[1:], 300, tmp_path)
    assert whole["result"] == "passed" and whole["tests"] == len(names)


def test_what_was_begun_comes_first_and_what_failed_last() -> None:
    results = ("failed", "passed", "unfinished", "too long")
    state: soak.State = {result: {"result": result} for result in results}
    assert soak.order([*results, "new"], state) == ["unfinished", "new", "failed", "too long"]
    assert soak.summary(["passed"], state) == 0
    assert soak.summary(["passed", "unfinished"], state) == soak.summary(["new"], state) == soak.LEFT
    assert soak.summary(["passed", "failed"], state) == soak.summary(["too long"], state) == 1

"""RELIABILITY S13: every mutant of the museum is killed by the test that it names; see museum.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from sizes import soak

sys.path.insert(0, str(Path(__file__).parent))
from museum import ROOT, Mutant, all_mutants, judge, mutated, run_test

MUTANTS = all_mutants()
AREAS = list(dict.fromkeys(mutant.area for mutant in MUTANTS))
QUICKEST = [
    "fairness goes before priority",
    "the most recent block is evicted first",
    "the repetition penalty rewards",
    "the parents of guesses are one place off",
    "the drawn token's own logprob is free",
    "a fork has blocks without a reference",
]


def run(*arguments: str | Path, state: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tests/museum/museum.py"), *map(str, arguments), "--state", str(state)]
    env = {name: value for name, value in os.environ.items() if not name.startswith("ICC_SOAK")}
    return subprocess.run(command, capture_output=True, text=True, env=env)


def test_every_mutant_says_what_it_changes_and_which_test_minds() -> None:
    assert len(MUTANTS) >= 60 and len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    for mutant in MUTANTS:
        assert mutant.source() != (ROOT / mutant.file).read_text()
        file, _, name = mutant.test.partition("::")
        assert not name or f"def {name.partition('[')[0]}(" in (ROOT / file).read_text(), mutant.test
        assert not mutant.file.startswith(("tests/", "compiler/frontend/")), "traces are kept between tests"


def test_the_quickest_are_killed(tmp_path: Path) -> None:
    """The tests without a mutant are not run here: the suite runs them."""
    done = run(*QUICKEST, "--mutants-only", state=tmp_path / "state.json")
    assert done.returncode == 0 and done.stdout.endswith("6 killed\n"), done.stdout + done.stderr


@pytest.mark.parametrize("area", soak(*AREAS))
def test_all_are_killed(area: str) -> None:
    """Known results are kept: a part of `make soak` that was interrupted continues."""
    done = run("--area", area, "--minutes", "600", state=ROOT / "build" / "museum.json")
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_does_not_fail_or_does_not_run_is_no_kill(tmp_path: Path) -> None:
    """A mutant that its test does not notice survives; one that breaks the import is not killed."""
    (tmp_path / "icc").mkdir()
    (tmp_path / "icc" / "__init__.py").write_text("")
    for name, text, result in (
        ("passes", "def test_x() -> None: pass", "passed"),
        ("fails", "def test_x() -> None: raise ValueError('so')", "failed"),
        ("broken", "import nothing_of_this_name", "broken"),
    ):
        (tmp_path / "icc" / f"test_{name}.py").write_text(text)
        found = run_test(tmp_path / "icc", f"test_{name}.py", {})
        assert found["result"] == result, (name, found)
    assert "so" in run_test(tmp_path / "icc", "test_fails.py", {})["said"]


def test_the_checkout_is_never_changed(tmp_path: Path) -> None:
    mutant = next(mutant for mutant in MUTANTS if mutant.name == QUICKEST[0])
    target, before = tmp_path / "icc" / mutant.file, (ROOT / mutant.file).read_text()
    target.parent.mkdir(parents=True)
    os.link(ROOT / mutant.file, target)
    with mutated(tmp_path / "icc", mutant):
        assert target.read_text() == mutant.source() and (ROOT / mutant.file).read_text() == before
    assert target.read_text() == before and target.samefile(ROOT / mutant.file)


def test_a_test_that_fails_anyway_kills_nothing(tmp_path: Path) -> None:
    mutant = Mutant("x", "area", "runtime/nesting.py", "deepest += 1", "deepest += 2", "tests/nothing.py::test_x")
    assert judge(tmp_path, mutant, {f"{mutant.test} {{}}": "failed"})["result"] == "fails without it"

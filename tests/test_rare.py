"""The tests that `make test` leaves out: never all of a file, never one that is named, and only ids that exist."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import rare

SECONDS = {
    "a.py::f[1]": 5.0,
    "a.py::f[2]": 9.0,
    "a.py::g": 15.0,
    "a.py::h": 0.0,
    "b.py::h[x]": 80.0,
    "b.py::h[y]": 81.0,
}


def taken(shared: dict[str, float] | None = None, **fixtures: str) -> rare.Taken:
    users = {name: frozenset(key for key, letters in fixtures.items() if name[6] in letters) for name in SECONDS}
    return rare.Taken(dict(SECONDS), users, shared or {})


def test_the_dearest_tests_are_rare_until_it_is_enough() -> None:
    assert rare.chosen(taken(), 1000) == {}
    assert set(rare.chosen(taken(), 110)) == {"b.py::h[y]"}
    assert set(rare.chosen(taken(), 105)) == {"b.py::h[y]", "a.py::f[2]"}, "a further case counts twice"
    assert set(rare.chosen(taken(), 95)) == {"b.py::h[y]", "a.py::g"}, "but takes what it takes"


def test_a_file_keeps_a_test_that_works() -> None:
    assert set(rare.chosen(taken(), 0)) == SECONDS.keys() - {"a.py::f[1]", "b.py::h[x]"}
    idle = rare.Taken({"c.py::f": 0.01, "c.py::g": 0.1})
    assert set(rare.chosen(idle, 0)) == {"c.py::f"}, "where none works, the dearest"
    dear = rare.Taken({"c.py::f": 0.01, "c.py::g": 0.1, "c.py::h": 9.0, "d.py::f": 9.0, "d.py::g": 10.0})
    assert set(rare.chosen(dear, 0)) == {"c.py::f", "c.py::h", "d.py::g"}, "one that is too dear, unless all are"


def test_a_fixture_is_counted_once() -> None:
    assert "a.py::f[1]" in rare.chosen(taken({"engine": 60.0}, engine="f"), 130), "it brings a dear one"
    assert rare.chosen(taken({"engine": 60.0}, engine="fg"), sum(SECONDS.values()) + 60) == {}
    assert rare.chosen(taken({"engine": 60.0}, engine="fg"), sum(SECONDS.values()) + 59) != {}


def test_parts_take_equally_long_and_hold_whole_files() -> None:
    tests = {f"{file}.py::f{number}": 10.0 for file in "abcdefghijklmnop" for number in range(3)}
    found = rare.chosen(rare.Taken(tests), 0)
    assert list(found) == sorted(found) and sorted(found.values()) == sorted(4 * list(range(rare.PARTS)))
    assert len({(name[0], part) for name, part in found.items()}) == 16


def test_what_a_run_took_is_read_and_a_later_one_holds(tmp_path: Path) -> None:
    for name, seconds in (("old", 1), ("new", 5)):
        (tmp_path / name).mkdir()
        lines = [f"a.py::f\tsetup\t{seconds}\tengine@a.py,tmp", f"a.py::f\tcall\t{seconds}", "engine@a.py\tfixture\t3"]
        (tmp_path / name / "1.tsv").write_text("\n".join(lines))
    (tmp_path / "old/2.tsv").write_text("b.py::g\tsetup\t1\t\nb.py::g\tcall\t1")
    found = rare.Taken()
    found.read(tmp_path / "old")
    found.read(tmp_path / "new")
    assert found.tests == {"a.py::f": 10, "b.py::g": 2} and found.shared == {"engine@a.py": 3}
    assert found.fixtures["a.py::f"] == {"engine@a.py", "tmp"}
    assert found.added(["a.py::f", "b.py::g"], set()) == 15 and found.added(["a.py::f"], {"engine@a.py"}) == 10


def test_what_was_rare_and_not_run_stays_rare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = tmp_path / "rare.txt"
    listed.write_text("3 a.py::before\n5 a.py::dear\n")
    (tmp_path / "run").mkdir()
    lines = ["a.py::cheap\tcall\t1", "a.py::dear\tcall\t9", "a.py::fine\tcall\t2"]
    (tmp_path / "run/1.tsv").write_text("\n".join(lines))
    monkeypatch.setattr(rare, "LIST", listed)
    monkeypatch.setattr(sys, "argv", ["rare.py", str(tmp_path / "run"), "--seconds", "5"])
    rare.main()
    assert listed.read_text() == "3 a.py::before\n0 a.py::dear\n"


MEASURED = """
import time, pytest
def work(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass
@pytest.fixture(scope="module", params=[1, 2])
def engine(request):
    work(0.2)
@pytest.fixture
def own():
    work(0.05)
def test_a(engine, own):
    work(0.1)
def test_b():
    pass
"""


def test_fixtures_are_measured_apart_from_tests(tmp_path: Path) -> None:
    (tmp_path / "test_x.py").write_text(MEASURED)
    environment = {
        **os.environ,
        "ICC_CPU_SECONDS": str(tmp_path / "cpu"),
        "PYTHONPATH": str(Path(rare.__file__).parent),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "cpu_seconds", "-p", "no:cacheprovider", "test_x.py"]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True)
    found = rare.Taken()
    found.read(tmp_path / "cpu")
    assert found.shared.keys() == {"engine[0]@test_x.py", "engine[1]@test_x.py"}
    assert all(0.19 <= seconds < 1 for seconds in found.shared.values())
    assert found.fixtures["test_x.py::test_a[2]"] == {"engine[1]@test_x.py"} and not found.fixtures["test_x.py::test_b"]
    assert 0.14 <= found.tests["test_x.py::test_a[1]"] < 0.3 and found.tests["test_x.py::test_b"] < 0.1


@pytest.fixture
def listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rare.txt").write_text("0 a.py::f[1]\n3 a.py::f[2]\n1 gone.py::f[a b]\n")
    monkeypatch.setattr(rare, "LIST", tmp_path / "rare.txt")


@pytest.mark.usefixtures("listed")
def test_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    items: list[Any] = [SimpleNamespace(nodeid=name) for name in SECONDS]

    def without(asked: str, *args: str) -> str:
        monkeypatch.setenv("ICC_RARE", asked)
        config: Any = SimpleNamespace(args=args)
        return "".join(item.nodeid[-2] for item in rare.left_out(config, items))

    assert without("", "tests") == without("1/8") == "12" and without("all") == ""
    assert (without("0/8"), without("3/8")) == ("2", "1")
    assert without("", "tests/a.py::f[1]") == ""
    for asked in ("8/8", "0/4", "yes"):
        with pytest.raises(pytest.UsageError, match=f"ICC_RARE={asked}: give 0/8 to 7/8, or all"):
            without(asked)


@pytest.mark.usefixtures("listed")
def test_names_that_no_test_has_are_found(tmp_path: Path) -> None:
    assert rare.stale(["a.py::f[1]"], tmp_path) == ["a.py::f[2]", "gone.py::f[a b]"]
    (tmp_path / "gone.py").touch()
    assert rare.stale(["a.py::f[1]"], tmp_path) == ["a.py::f[2]"], "a file that is there, but was not collected"
    assert rare.stale([], tmp_path) == ["a.py::f[1]", "a.py::f[2]"]


def test_every_rare_name_is_a_test(pytestconfig: pytest.Config) -> None:
    """Checks the files that this run collects; a run of all tests checks all."""
    assert pytestconfig.stash[rare.STALE] == [], "not in rare.txt any more: rename or delete their lines"

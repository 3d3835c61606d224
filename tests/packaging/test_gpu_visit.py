"""benchmarks/gpu_visit.py without a GPU: its parts begin, end in time, are reported, and are not repeated."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def visit() -> Any:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import gpu_visit
    finally:
        sys.path.pop(0)
    return gpu_visit


def test_a_visit_goes_on_where_it_stopped(visit: Any, tmp_path: Path) -> None:
    """Four parts: one passes, one fails until a file exists, one exceeds its time limit, one has a missing
    requirement."""
    wait = tmp_path / "there"
    again = "{python} -c \"open('{work}/runs', 'a').write('x')\""
    parts = [
        visit.Part("good", "passes", 30, (again, "{python} -c \"import icc; print('on', '{target}')\"")),
        visit.Part("bad", "fails", 30, ("echo so it is", f"test -e {wait}")),
        visit.Part("slow", "never ends", 1, ("sleep 60",)),
        visit.Part("other", "needs a tool", 30, ("true",), needs="no-such-tool"),
    ]
    out = tmp_path / "table.md"
    one = visit.Visit(parts, "h200", tmp_path / "work", out)
    assert one.run(600) == 2
    found = {name: outcome.status for name, outcome in one.outcomes.items()}
    assert found == {"good": "passed", "bad": "failed", "slow": "late", "other": "left out"}
    assert one.outcomes["good"].tail[-1] == "on h200" and one.outcomes["bad"].tail == ["so it is"]
    wait.touch()
    two = visit.Visit(parts, "h200", tmp_path / "work", out)
    assert two.run(600) == 1 and two.outcomes["bad"].status == "passed"
    assert (tmp_path / "work" / "runs").read_text() == "x", "what has passed is not run again"
    table = out.read_text()
    assert "| bad | fails | passed |" in table and "| slow | never ends | late |" in table and "on h200" in table
    assert set(json.loads((tmp_path / "work" / "visit.json").read_text())) == {"good", "bad", "slow", "other"}


def test_a_part_that_does_not_fit_is_not_begun(visit: Any, tmp_path: Path) -> None:
    part = visit.Part("long", "takes a minute", 60, ("true",))
    one = visit.Visit([part], "h200", tmp_path, tmp_path / "table.md")
    assert one.run(20) == 0 and not one.outcomes
    assert one.run(40) == 0 and one.outcomes["long"].status == "passed"


def _measured(visit: Any, work: Path, speed: float, us: float, right: bool, before: Any = None) -> tuple[Any, str]:
    """Run a visit whose first part prints its figures, and whose second writes them to the file of --out."""
    work.mkdir()
    rows = [{"check": "logits", "passed": right}, {"kernel": "linear", "phase": "d1", "us": us}]
    row = {"quant": "rtn4", "batch": 1, "decode_tok_s": speed, "of_bandwidth": 0.4}
    prints, writes = work / "prints.py", work / "writes.py"
    prints.write_text(f"import json; print(json.dumps({row!r}))")
    writes.write_text(f"import json, sys; open(sys.argv[2] + '.json', 'w').write(json.dumps({rows!r}))")
    parts = [
        visit.Part("speed", "prints", 30, (f"{{python}} {prints}",)),
        visit.Part("kernels", "writes", 30, (f"{{python}} {writes} --out {{work}}/kernels",)),
    ]
    out = work / "table.md"
    one = visit.Visit(parts, "h200", work, out, before)
    assert one.run(600) == 0
    return json.loads(out.with_suffix(".json").read_text()), out.read_text()


def test_a_visit_is_compared_with_the_one_before(
    visit: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, table = _measured(visit, tmp_path / "first", 1111.0, 40.0, True)
    assert before["speed"]["figures"] == {"rtn4 1 decode_tok_s": 1111.0} and "visit before" not in table
    assert before["kernels"]["answers"] == {"logits": True}
    _, table = _measured(visit, tmp_path / "same", 1100.0, 41.0, True, before)
    assert "## Beside the visit before\n\n- 2 figures compared, 5 % is noise" in table
    _, table = _measured(visit, tmp_path / "worse", 900.0, 60.0, False, before)
    assert "- speed: rtn4 1 decode_tok_s: 1111 before, 900 now, 1.23x slower" in table
    assert "- kernels: linear d1 us: 40 before, 60 now, 1.50x slower" in table
    assert "- kernels: logits: right before, wrong now" in table and table.count("slower") == 2
    assert "1.23x slower" in capsys.readouterr().out
    lines = visit.compared({"a": {"status": "late"}}, {"a": {"status": "passed"}, "b": {"status": "passed"}})
    assert lines == ["a: passed before, late now", "0 figures compared, 5 % is noise"]


@pytest.mark.parametrize("text", [None, "{", "[]", "{}", '{"a": 3}'])
def test_an_earlier_visit_that_is_none_is_refused(
    text: str | None, visit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "before.json"
    if text is not None:
        file.write_text(text)
    monkeypatch.setattr(sys, "argv", ["gpu_visit.py", "--list", "--before", str(file)])
    with pytest.raises(SystemExit) as ended:
        visit.main()
    assert ended.value.code == 2 and f"--before {file}: " in capsys.readouterr().err


def test_parts_name_scripts_and_options_that_there_are(visit: Any) -> None:
    for part in visit.PARTS:
        for command in part.commands:
            words = [
                word.format(python="python", target="h200", work="/w", here=visit.HERE) for word in shlex.split(command)
            ]
            scripts = [Path(word) for word in words if word.endswith(".py")]
            assert all(script.is_file() for script in scripts), command
            if scripts and scripts[0].parent == visit.HERE:
                known = set(re.findall(r'"(--[a-z-]+)"', scripts[0].read_text()))
                assert {word for word in words if word.startswith("--")} <= known, command


def test_objects_that_travel_along_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects of another version of Triton are taken before those of this machine's; damaged ones are not taken."""
    from icc.compiler.backends.triton.objects import compile as objects
    from icc.compiler.targets import TARGETS

    carried, here = objects.Compiled("k", b"there", 0, 32, 0, 12000), objects.Compiled("k", b"here", 0, 32, 0, 12000)
    monkeypatch.setenv("ICC_CACHE_DIR", str(tmp_path / "there"))
    objects._store(other := objects._cache_folder("k_1", TARGETS["h200"], "3.7.1"), carried)
    monkeypatch.setenv("ICC_CACHE_DIR", str(tmp_path / "here"))
    objects._store(place := objects._cache_folder("k_1", TARGETS["h200"], "3.6.0"), here)
    assert objects._carried(place) is None
    monkeypatch.setenv("ICC_CARRIED_OBJECTS", str(tmp_path / "there"))
    assert objects._carried(place) == carried
    (other / "object").write_bytes(b"x")
    assert objects._carried(place) is None and objects._load(place) == here

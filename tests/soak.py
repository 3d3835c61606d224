"""Runs all tests at soak sizes (tests/sizes.py), a file at a time, in sessions of limited time.

    python tests/soak.py [--minutes 20] [--state build/soak.json] [FILE ...]

When the minutes are over it stops, even in the middle of a file; the next call continues with that file's tests that
have not passed (tests/passed.py), then runs files that were never run, and files that failed last. The state file has
each file's result, time and commit; delete it to start over. Exit code: 0 when every file has passed, 1 when one has
failed or no test of a file fits into so many minutes, 3 when some are left.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
State = dict[str, dict[str, Any]]
LEFT = 3  # exit code
TURNS = ("unfinished", "not run", "failed", "too long")  # runs the tests that have not passed
GRACE_S = 60.0  # for tests that are interrupted


def test_files(names: list[str]) -> list[str]:
    """The test files named, or below the folders named; all test files if `names` is empty."""
    roots = [Path(name).resolve() for name in names] or [ROOT / "tests"]
    found = [file for root in roots for file in ([root] if root.is_file() else sorted(root.rglob("test_*.py")))]
    return [str(file.relative_to(ROOT)) for file in found]


def run(file: str, before: list[str], seconds: float, compiled: Path) -> dict[str, Any]:
    """The result of one file, run without the tests that passed `before`: "passed", "failed" or, if the seconds ran
    out, "unfinished"; how many tests passed, the failed tests, and unless all passed the ids of those that did
    (`ids`)."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="icc-soak-") as folder:
        report, ids = Path(folder) / "report.xml", Path(folder) / "passed"
        ids.write_text("".join(f"{name}\n" for name in before))
        command = [sys.executable, "-m", "pytest", "-q", file, f"--junitxml={report}"]
        env = {**os.environ, "ICC_SOAK": "1", "ICC_PASSED": str(ids), "ICC_COMPILED_ONCE": str(compiled)}
        code = ended(command, env, seconds)
        passed = ids.read_text().splitlines()
        cases = list(ElementTree.parse(report).iter("testcase")) if report.is_file() else []
    found: dict[str, Any] = {"seconds": round(time.monotonic() - began), "tests": len(passed)}
    if code is None:
        return {"result": "unfinished", **found, "ids": passed}
    nothing = 5  # pytest's exit code if no test was selected
    if code in (0, nothing):
        return {"result": "passed", **found}
    failed = [
        f"{case.get('classname')}::{case.get('name')}"
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    ]
    return {"result": "failed", **found, "ids": passed, "failed": failed or [f"pytest ended with {code}"]}


def ended(command: list[str], env: dict[str, str], seconds: float) -> int | None:
    """The exit code of a command; None if it was stopped with all its processes because the seconds were over."""
    with subprocess.Popen(command, cwd=ROOT, env=env, start_new_session=True) as process:
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # tests then end their own processes
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def order(files: list[str], state: State) -> list[str]:
    """Files that have not passed: first unfinished ones, then those never run, then those that failed or do not fit."""
    results = {file: state.get(file, {}).get("result", "not run") for file in files}
    return sorted((file for file in files if results[file] != "passed"), key=lambda file: TURNS.index(results[file]))


def summary(files: list[str], state: State) -> int:
    """Print the state of the files; returns the exit code."""
    results = [state.get(file, {}).get("result", "not run") for file in files]
    print(", ".join(f"{results.count(kind)} {kind}" for kind in ("passed", *TURNS)))
    for file in files:
        for name in state.get(file, {}).get("failed", ()):
            print(f"  {file}: {name}")
    bad = "failed" in results or "too long" in results
    return 1 if bad else LEFT if {"not run", "unfinished"} & set(results) else 0


def main() -> int:
    """Run files until the time is over; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="files or folders of tests (default: all)")
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--state", type=Path, default=ROOT / "build" / "soak.json")
    options = parser.parse_args()
    state: State = json.loads(options.state.read_text()) if options.state.is_file() else {}
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    files, end = test_files(options.files), time.monotonic() + 60 * options.minutes
    options.state.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="icc-soak-compiled-") as compiled:
        for number, file in enumerate(order(files, state)):
            if (left := end - time.monotonic()) <= 0:
                break
            before = state.get(file, {}).get("ids", [])
            found = run(file, before, left, Path(compiled))
            if found["result"] == "unfinished" and not number and len(found["ids"]) == len(before):
                found["result"] = "too long"  # it had the whole time, and no test ended
            state[file] = {**found, "commit": commit.strip()}
            partial = options.state.with_suffix(".partial")
            partial.write_text(json.dumps(state, indent=1) + "\n")
            partial.replace(options.state)
            print(f"{found['result']:>10} {file} {found['seconds']} s", flush=True)
    return summary(files, state)


if __name__ == "__main__":
    sys.exit(main())

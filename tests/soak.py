"""All tests at the sizes of a night (tests/sizes.py), a file at a time, in pieces that one sitting has time for.

    python tests/soak.py [--minutes 20] [--state build/soak.json] [FILE ...]

Starts no file once the minutes are over, and ends one that alone takes longer; the next call goes on with the files
that have not passed, those that failed last. The state file says of each file what came out, how long it took and at
which commit; delete it to begin anew. Exit code: 0 when every file has passed, 1 when one has failed, 3 when some are
left.
"""

from __future__ import annotations

import argparse
import json
import os
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


def test_files(names: list[str]) -> list[str]:
    """The test files named, or below the folders named; of all tests if none is."""
    roots = [Path(name).resolve() for name in names] or [ROOT / "tests"]
    found = [file for root in roots for file in ([root] if root.is_file() else sorted(root.rglob("test_*.py")))]
    return [str(file.relative_to(ROOT)) for file in found]


def run(file: str, seconds: float) -> dict[str, Any]:
    """What came of one file: "passed", "failed" or "too long", its counts, and the tests that failed."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="icc-soak-") as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", file, f"--junitxml={report}"]
        try:
            done = subprocess.run(command, cwd=ROOT, env={**os.environ, "ICC_SOAK": "1"}, timeout=seconds)
        except subprocess.TimeoutExpired:
            return {"result": "too long", "seconds": round(time.monotonic() - began)}
        cases = list(ElementTree.parse(report).iter("testcase")) if report.is_file() else []
    failed = [
        f"{case.get('classname')}::{case.get('name')}"
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    ]
    nothing = 5  # pytest's exit code of a file from which nothing was picked
    result = "passed" if done.returncode in (0, nothing) else "failed"
    found: dict[str, Any] = {"result": result, "seconds": round(time.monotonic() - began), "tests": len(cases)}
    return found | ({"failed": failed or [f"pytest ended with {done.returncode}"]} if result == "failed" else {})


def order(files: list[str], state: State) -> list[str]:
    """Files that have not passed: first what was never run, then what failed or took too long."""
    left = [file for file in files if state.get(file, {}).get("result") != "passed"]
    return sorted(left, key=lambda file: file in state)


def summary(files: list[str], state: State) -> int:
    """Print what is known of the files; the exit code."""
    results = [state.get(file, {}).get("result", "not run") for file in files]
    print(", ".join(f"{results.count(kind)} {kind}" for kind in ("passed", "failed", "too long", "not run")))
    for file in files:
        for name in state.get(file, {}).get("failed", ()):
            print(f"  {file}: {name}")
    bad = "failed" in results or "too long" in results
    return 1 if bad else LEFT if "not run" in results else 0


def main() -> int:
    """Run files until the time is over."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="files or folders of tests (default: all)")
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--state", type=Path, default=ROOT / "build" / "soak.json")
    options = parser.parse_args()
    state: State = json.loads(options.state.read_text()) if options.state.is_file() else {}
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    files, end = test_files(options.files), time.monotonic() + 60 * options.minutes
    for file in order(files, state):
        if time.monotonic() >= end:
            break
        state[file] = {**run(file, 60 * options.minutes), "commit": commit.strip()}
        options.state.parent.mkdir(parents=True, exist_ok=True)
        partial = options.state.with_suffix(".partial")
        partial.write_text(json.dumps(state, indent=1) + "\n")
        partial.replace(options.state)
        print(f"{state[file]['result']:>8} {file} {state[file]['seconds']} s", flush=True)
    return summary(files, state)


if __name__ == "__main__":
    sys.exit(main())

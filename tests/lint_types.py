"""Runs pyright over the files that pyproject.toml includes, and checks that it analyzed all of them.

    python tests/lint_types.py         its errors, a line each; exit 1 if there are any, or if it left files out

pyright succeeds if it finds no files: it only mentions a missing folder of `include`, and not even that for one of
`strict`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def left_out(root: Path, section: dict[str, Any], analyzed: int) -> Iterator[str]:
    """The paths below `root` that pyright cannot have analyzed. section: [tool.pyright]; analyzed: how many files it
    analyzed."""
    for option in ("include", "strict"):
        yield from (f"{option}: there is no {name}" for name in section.get(option, ()) if not (root / name).exists())
    included = [root / name for name in section["include"]]
    wanted = sum(len(list(path.rglob("*.py"))) if path.is_dir() else path.exists() for path in included)
    if analyzed < wanted or not wanted:
        yield f"pyright has analyzed {analyzed} of {wanted} files"


def described(found: dict[str, Any]) -> str:
    """One of pyright's diagnostics as a line."""
    start = found["range"]["start"]
    return f"{found['file']}:{start['line'] + 1}:{start['character'] + 1}: {found['severity']}: {found['message']}"


def main(root: Path) -> int:
    """Run pyright in `root` and print its errors; returns the exit code."""
    section = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["pyright"]
    command = [sys.executable, "-m", "pyright", "--project", str(root), "--pythonpath", sys.executable, "--outputjson"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    if not done.stdout.startswith("{"):
        print(done.stdout, done.stderr, sep="\n")
        return 1
    report = json.loads(done.stdout)
    wrong = [described(found) for found in report["generalDiagnostics"] if found["severity"] == "error"]
    wrong += left_out(root, section, report["summary"]["filesAnalyzed"])
    print(*wrong, f"pyright: {report['summary']['filesAnalyzed']} files, {len(wrong)} faults", sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(Path(__file__).parents[1]))

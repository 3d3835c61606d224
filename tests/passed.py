"""A run of tests that goes on where another one stopped: ICC_PASSED is a file of the ids that passed, a line each.

They are left out, and what passes now is added when it has ended, with its fixtures; see soak.py.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

_FILE = os.environ.pop("ICC_PASSED", None)  # of this run, and not of pytest runs that tests start
_failed: set[str] = set()


def leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take from `items` what has passed before."""
    if _FILE is None:
        return
    before = set(Path(_FILE).read_text().splitlines())
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in before])
    items[:] = [item for item in items if item.nodeid not in before]


def note(report: pytest.TestReport) -> None:
    """Write down a test that has ended well; one that was skipped has, too."""
    if _FILE is None:
        return
    if report.failed:
        _failed.add(report.nodeid)
    elif report.when == "teardown" and report.nodeid not in _failed:
        with open(_FILE, "a") as file:
            file.write(f"{report.nodeid}\n")

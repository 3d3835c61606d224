"""Continues a stopped run of tests: ICC_PASSED names a file with the ids that passed, one per line.

These tests are left out, and each test that passes is added once its fixtures have ended; see soak.py.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

_FILE = os.environ.pop("ICC_PASSED", None)  # for this run only, not for runs that tests start
_failed: set[str] = set()


def leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Remove from `items` the tests that have passed before."""
    if _FILE is None:
        return
    before = set(Path(_FILE).read_text().splitlines())
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in before])
    items[:] = [item for item in items if item.nodeid not in before]


def note(report: pytest.TestReport) -> None:
    """Record a test that has passed or was skipped."""
    if _FILE is None:
        return
    if report.failed:
        _failed.add(report.nodeid)
    elif report.when == "teardown" and report.nodeid not in _failed:
        with open(_FILE, "a") as file:
            file.write(f"{report.nodeid}\n")

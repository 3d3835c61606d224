"""A plugin of pytest that writes what each test takes of the CPU, its processes included: `-p cpu_seconds`, with the
folder in ICC_CPU_SECONDS. A line is a test's id, a phase, and seconds; every worker has a file. See rare.py."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest


def _seconds() -> float:
    parts = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(part.ru_utime + part.ru_stime for part in parts)


def _timed(item: pytest.Item, phase: str) -> Iterator[None]:
    begin = _seconds()
    yield
    folder = Path(os.environ["ICC_CPU_SECONDS"])
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{os.getpid()}.tsv").open("a") as file:
        file.write(f"{item.nodeid}\t{phase}\t{_seconds() - begin:.3f}\n")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    yield from _timed(item, "setup")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    yield from _timed(item, "call")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    yield from _timed(item, "teardown")

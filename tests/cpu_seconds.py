"""A pytest plugin that records the CPU seconds of tests, their processes included: `-p cpu_seconds`.

Every worker has a file in the folder ICC_CPU_SECONDS, which rare.py reads. A line is

    ID       setup, call or teardown    seconds    after setup: the shared fixtures of the test, by their keys
    KEY      fixture                    seconds

A fixture is shared unless its scope is a function. Its seconds are not counted for the test that creates it.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_fixtures: list[tuple[str, float]] = []  # created in this setup


def _seconds() -> float:
    parts = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(part.ru_utime + part.ru_stime for part in parts)


def _write(*fields: str) -> None:
    folder = Path(os.environ["ICC_CPU_SECONDS"])
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{os.getpid()}.tsv").open("a") as file:
        file.write("\t".join(fields) + "\n")


def _key(item: Any, fixture: Any) -> str:
    """Names a shared fixture: the index of its parameter in brackets, and the test file that it is created for."""
    index = item.callspec.indices.get(fixture.argname) if hasattr(item, "callspec") else None
    name = fixture.argname if index is None else f"{fixture.argname}[{index}]"
    return name if fixture.scope == "session" else f"{name}@{item.nodeid.partition('::')[0]}"


def _shared(item: Any) -> list[str]:
    """The keys of the shared fixtures that a test uses, directly or through other fixtures."""
    found = getattr(item, "_fixtureinfo", None)
    known = found.name2fixturedefs if found else {}
    last = [known[name][-1] for name in found.names_closure if name in known] if found else []
    return [_key(item, fixture) for fixture in last if fixture.scope != "function"]


def _timed(item: pytest.Item, phase: str) -> Iterator[None]:
    _fixtures.clear()
    begin = _seconds()
    yield
    taken = _seconds() - begin - sum(seconds for _, seconds in _fixtures)
    for key, seconds in _fixtures:
        _write(key, "fixture", f"{seconds:.3f}")
    _write(item.nodeid, phase, f"{max(taken, 0):.3f}", *([",".join(_shared(item))] if phase == "setup" else []))


@pytest.hookimpl(hookwrapper=True)
def pytest_fixture_setup(fixturedef: Any, request: Any) -> Iterator[None]:
    begin = _seconds()
    yield
    if fixturedef.scope != "function":
        _fixtures.append((_key(request._pyfuncitem, fixturedef), _seconds() - begin))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    yield from _timed(item, "setup")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    yield from _timed(item, "call")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    yield from _timed(item, "teardown")

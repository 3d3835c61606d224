"""Which cases `make test` leaves out: never all of a function, and never one that is named."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import rare

SECONDS = {"a.py::f[1]": 5.0, "a.py::f[2]": 9.0, "a.py::f[3]": 7.0, "a.py::g": 50.0, "b.py::h[x]": 8.0}


def test_the_dearest_cases_are_rare_until_it_is_enough() -> None:
    assert rare.chosen(SECONDS, 75) == ["a.py::f[2]"]
    assert rare.chosen(SECONDS, 65) == rare.chosen(SECONDS, 0) == ["a.py::f[2]", "a.py::f[3]"]
    assert rare.chosen(SECONDS, 100) == []


def test_what_runs(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rare.txt").write_text("a.py::f[1]\na.py::f[2]\na.py::f[3]\ngone.py::f[1]\n")
    monkeypatch.setattr(rare, "LIST", tmp_path / "rare.txt")
    items: list[Any] = [SimpleNamespace(nodeid=name) for name in SECONDS]
    whole: Any = SimpleNamespace(args=["tests"])

    def without(asked: str, config: Any = whole) -> str:
        monkeypatch.setenv("ICC_RARE", asked)
        return "".join(item.nodeid[-2] for item in rare.left_out(config, items))

    assert without("") == "123" and without("all") == ""
    assert (without("0/2"), without("1/2")) == ("2", "13"), "a shard of them, by their places in the list"
    assert without("", SimpleNamespace(args=["tests/a.py::f[1]"])) == ""

"""A command that is ended while it writes leaves nothing half-written, even while it removes files."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from icc.compiler.engine import atomic
from icc.compiler.errors import WriteError
from icc.compiler.graph.parser import parse_graph
from icc.compiler.interrupt import ends_at_once
from icc.compiler.onnx.export import export_graph
from icc.compiler.onnx.write import write_model

GRAPH = "graph(%token_ids: i64[T]):\n  %0: f32[T, 64] = icc.embedding(%token_ids, @x: f32[128, 64])\n  return %0\n"


@pytest.fixture
def left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The names in the directory, each time that the process would have exited."""
    found: list[list[str]] = []

    def end(code: int) -> None:
        found.append(sorted(path.name for path in tmp_path.iterdir()))
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", end)
    return found


def terminated(*_: Any) -> None:
    """Send SIGTERM to this process."""
    signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize("output", [atomic.engine_output, atomic.directory, atomic.engine_file, atomic.written])
def test_a_signal_while_something_half_written_is_removed(
    output: Callable[[Path], Any], tmp_path: Path, left: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Like a second Ctrl-C of a user for whom removing the weights takes too long."""
    real = shutil.rmtree

    def removed(*arguments: Any, **options: Any) -> None:
        monkeypatch.setattr(shutil, "rmtree", real)
        terminated()

    with pytest.raises(SystemExit), ends_at_once(), output(tmp_path / "a.engine"):
        monkeypatch.setattr(shutil, "rmtree", removed)
        raise KeyboardInterrupt
    assert left == [[]]


def test_an_export_that_is_ended(tmp_path: Path, left: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    graph = parse_graph(GRAPH)
    exported = export_graph(graph)
    (tmp_path / "m.onnx").write_bytes(b"old")
    monkeypatch.setattr(type(next(iter(graph.weights.values()))), "load", terminated)
    with pytest.raises(SystemExit), ends_at_once():
        write_model(exported, tmp_path / "m.onnx", external=True)
    assert left == [["m.onnx"]] and (tmp_path / "m.onnx").read_bytes() == b"old"


def test_a_limit_on_the_size_of_files_is_named(tmp_path: Path) -> None:
    """The disk may have plenty of room then."""
    with (
        pytest.raises(WriteError, match="larger than this process may write") as found,
        atomic.engine_output(tmp_path / "e"),
    ):
        raise OSError(errno.EFBIG, "File too large")
    assert "ulimit -f" in found.value.hint and not list(tmp_path.iterdir())

"""The `icc` command: summaries, exit codes, and no traceback for a user's mistake."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from icc.compiler.cli import main


def run(*args: object) -> Any:
    return CliRunner().invoke(main, [str(a) for a in args])


def test_compile_prints_what_it_did(compiled: Callable[..., Any], tmp_path: Path) -> None:
    checkpoint = compiled("llama").checkpoint
    result = run(
        "compile", checkpoint, "-o", tmp_path / "e", "--target", "native", "--quant", "rtn4", "--keep", "*down_proj*"
    )
    assert result.exit_code == 0, result.output
    for word in ("bits per weight", "paged-attention", "kept by --keep", "time", "weights"):
        assert word in result.output


def test_json_report_and_explain(compiled: Callable[..., Any], tmp_path: Path) -> None:
    checkpoint = compiled("llama").checkpoint
    result = run(
        "compile", checkpoint, "-o", tmp_path / "e", "--target", "native", "--json", "--dump-passes", tmp_path / "d"
    )
    report = json.loads(result.stdout)
    assert report["kernels"] > 5 and report["roofline"]["decode"]
    assert sorted(p.name for p in (tmp_path / "d").iterdir()) == ["attention", "canonicalize", "fuse", "lower"]
    explained = run("compile", checkpoint, "-o", tmp_path / "f", "--target", "native", "--explain", "fuse-add-norm")
    assert "the norm does not read a sum" in explained.output


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (("--target", "tpu"), 2, "unknown target 'tpu'"),
        (("--max-seq-len", "100000"), 14, "--max-seq-len 100000"),
        (("--max-batch-size", "0"), 2, "--max-batch-size"),
        (("--quant", "rtn4", "--keep", "nothing_has_this_name"), 2, "nothing_has_this_name"),
        (("--quant", "awq4", "--calib", "/no/such/file"), 2, "has no tokenizer.json"),
    ],
)
def test_refusals(args: tuple[str, ...], code: int, words: str, compiled: Callable[..., Any], tmp_path: Path) -> None:
    result = run("compile", compiled("llama").checkpoint, "-o", tmp_path / "e", *args)
    assert result.exit_code == code, result.output
    assert words in result.output and "Traceback" not in result.output
    assert list(tmp_path.iterdir()) == []


def test_not_a_checkpoint(tmp_path: Path) -> None:
    result = run("compile", tmp_path, "-o", tmp_path / "e")
    assert result.exit_code == 10 and "config.json" in result.output


def test_inspect_shows_engines_and_checkpoints(compiled: Callable[..., Any]) -> None:
    found = compiled("llama")
    graph = run("inspect", found.checkpoint)
    assert "icc.rms_norm" in graph.output
    engine = run("inspect", found.engine)
    assert engine.exit_code == 0

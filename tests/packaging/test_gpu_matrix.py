"""benchmarks/gpu_matrix.py in shards: stored results are not compiled again, and cases without a run are marked."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def matrix(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, as a module."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location("gpu_matrix", BENCHMARKS / "gpu_matrix.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_matrix", module)
    spec.loader.exec_module(module)
    return module


def test_values_of_quant_with_one_format_are_one_case(matrix: ModuleType) -> None:
    found = matrix.cases(["llama-8b"], ["h100", "b200"], ["none", "rtn4", "awq4", "gptq4", "fp8"], ["int8"])
    assert [case.key for case in found] == [
        f"llama-8b/{target}/{stored}/{kv}"
        for stored, kv in (("none", "auto"), ("q4", "auto"), ("e4m3", "auto"), ("none", "int8"))
        for target in ("h100", "b200")
    ]


def test_a_run_goes_on_where_the_last_one_stopped(
    matrix: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One case per run, as if it took all the time. An error is also a result."""
    seen: list[str] = []
    clock = [0.0]

    def compiled(case: Any) -> dict[str, Any]:
        seen.append(case.key)
        clock[0] += 1000
        if case.target == "b200":
            return {"error": "kernel x: does not fit"}
        faults = ["linear_tile_1: 9 barriers per step", "linear_tile_2: waits"]
        return {"objects": 76, "refused": ["a tiling"], "spill": 0, "faults": faults, "unshown": 0, "seconds": 1}

    monkeypatch.setattr(matrix, "compiled", compiled)
    monkeypatch.setattr(matrix.time, "monotonic", lambda: clock[0])
    out = tmp_path / "matrix"
    arguments = [
        "--minutes",
        "1",
        "--models",
        "llama-8b",
        "--targets",
        "h100,b200",
        "--quants",
        "rtn4,awq4",
        "--kv",
        "",
    ]
    monkeypatch.setattr(sys, "argv", ["gpu_matrix.py", *arguments, "--out", str(out)])
    for count in (1, 2, 2):
        matrix.main()
        assert len(seen) == len(set(seen)) == len(json.loads(out.with_suffix(".json").read_text())) == count
    page = out.with_suffix(".md").read_text()
    [row] = [line for line in page.split("## llama-1b")[0].splitlines() if line.startswith("| awq4, auto |")]
    cells = dict(zip(matrix.GPUS, row.split(" | ")[1:], strict=True))
    assert cells["h100"] == "76, 1 refused, 2 faults" and cells["b200"] == "**no** (1)"
    assert cells["a100"] == "not run" and "1. kernel x: does not fit" in page
    assert (
        f"2 of {len(matrix.cases(list(matrix.MODELS), matrix.GPUS, list(matrix.QUANTIZATIONS), matrix.CACHES))}" in page
    )


def test_a_sample_has_all_models_targets_storages_and_caches(matrix: ModuleType) -> None:
    found = matrix.sample()
    assert [case.model for case in found[:8]] == ["llama-8b"] * 8 and found[0].target == "h100"
    wanted = matrix.cases(list(matrix.MODELS), matrix.GPUS, list(matrix.QUANTIZATIONS), matrix.CACHES)
    for part in ("model", "target", "stored", "kv"):
        assert {getattr(case, part) for case in found} == {getattr(case, part) for case in wanted}
    assert len({case.key for case in found}) == len(found) < 40


def test_a_crash_is_a_result(matrix: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def lowered(*_: Any, **__: Any) -> None:
        raise KeyError("x")

    monkeypatch.setattr(matrix, "lowered", lowered)
    assert matrix.compiled(matrix.sample()[0]) == {"error": "ends in KeyError: 'x'"}

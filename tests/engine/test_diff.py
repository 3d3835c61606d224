"""`icc diff`: the differences between two engines."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import icc
import pytest
from click.testing import CliRunner
from icc.compiler.cli import main
from icc.compiler.commands.diff import shown_differences
from icc.compiler.differences import AnswerDifference, EngineDifferences, compare_answers
from icc.compiler.engine import directory
from icc.runtime.format.canaries import Canaries, Canary
from icc.runtime.format.load import read_manifest
from safetensors.torch import load_file, save_file


def diff(*paths: Path) -> dict[str, Any]:
    done = CliRunner().invoke(main, ["diff", *map(str, paths), "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def engines(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Compiles a tiny llama; with `changed`, the values of one matrix are doubled."""
    folder = tmp_path_factory.mktemp("diff")
    tiny.save_tiny(tiny.tiny_configs()["llama"], folder / "plain")
    shutil.copytree(folder / "plain", folder / "changed")
    tensors = load_file(folder / "plain" / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"] *= 2
    save_file(tensors, folder / "changed" / "model.safetensors", {"format": "pt"})
    made: dict[Any, Path] = {}

    def make(changed: bool = False, target: str = "native", **options: Any) -> Path:
        key = changed, target, *sorted(options.items())
        if key not in made:
            model, output = folder / ("changed" if changed else "plain"), folder / f"{len(made)}.engine"
            made[key] = icc.compile(model, output, target=target, max_seq_len=64, max_batch_size=4, **options)
        return made[key]

    return make


def test_one_tensor(engines: Callable[..., Path]) -> None:
    found = diff(engines(), engines(True))
    assert not found["equal"] and not found["program"] and not found["kernels"] and not found["files"]
    assert found["options"] == found["facts"] == {}
    [tensor] = found["tensors"]
    assert tensor["name"] == "model.layers.1.mlp.down_proj.weight" and tensor["norm"] == pytest.approx(1)
    assert tensor["largest"] > 0.1 and tensor["formats"][0] == tensor["formats"][1] and found["equal_tensors"] > 5
    assert found["answers"]["deviation"] > 0.01 and found["answers"]["positions"] == 8
    shown = CliRunner().invoke(main, ["diff", str(engines()), str(engines(True))]).output
    assert "tensors that differ (1; " in shown and "model.layers.1.mlp.down_proj.weight  1" in shown


def test_the_same(engines: Callable[..., Path], tmp_path: Path) -> None:
    shutil.copytree(engines(), tmp_path / "engine")
    found = diff(engines(), tmp_path / "engine")
    assert found["equal"] and not found["tensors"] and found["answers"]["deviation"] == 0
    shown = CliRunner().invoke(main, ["diff", str(engines()), str(tmp_path / "engine")])
    assert shown.stdout == "the engines are the same\n"


def test_the_runtime_of_another_icc_is_no_difference(
    engines: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    own, limits = engines(), {"max_seq_len": 64, "max_batch_size": 4}
    model = own.parent / "plain"
    monkeypatch.setattr(directory, "copy_main", lambda stage: (stage / "__main__.py").write_text("pass"))
    other = icc.compile(model, tmp_path / "other.engine", target="native", **limits)
    assert read_manifest(other).digest != read_manifest(own).digest and diff(own, other)["equal"]


@pytest.mark.parametrize("target", ["native", "h100"])
def test_another_quantization_is_compared_by_its_values(target: str, engines: Callable[..., Path]) -> None:
    found = diff(engines(), engines(target=target, quant="fp8" if target == "h100" else "rtn4"))
    assert found["options"]["quant"][0] is None and found["facts"]["quantization.method"][0] == "none"
    norms = {tensor["name"]: tensor["norm"] for tensor in found["tensors"]}
    assert 0.001 < norms["model.layers.1.mlp.down_proj.weight"] < 0.2
    assert found["answers"]["deviation"] < 1


def test_answers_without_a_common_id_have_no_deviation() -> None:
    """JSON has no number for infinity."""
    one, other = (Canaries(0.1, [Canary([5, 6], [1], [ids], [[3.0, 1.0]])]) for ids in ([1, 2], [3, 4]))
    found = compare_answers(one, other)
    assert found == AnswerDifference(prompts=1, deviation=None, same_best=0, positions=1)
    shown = shown_differences(EngineDifferences({}, {}, "", [], [], 3, found, []))
    assert shown["answers"] == "too far apart to compare; the best token is the same at 0 of 1 positions"


def test_what_is_no_engine(engines: Callable[..., Path], tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["diff", str(engines()), str(tmp_path)])
    assert done.exit_code == 20 and "Traceback" not in done.output

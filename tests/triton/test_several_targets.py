"""One engine for a CPU and an H100: compiled once, it serves from both, here over a fake driver of the GPU."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import icc
import numpy as np
import pytest
from fake_cuda import FakeDriver
from icc.compiler.backends.triton.backend import TritonBackend
from icc.compiler.cli import main
from icc.compiler.errors import UsageError
from icc.compiler.program.program import program_of
from icc.compiler.targets import TARGETS
from icc.runtime.executor.cuda import compat
from icc.runtime.executor.cuda.driver import Cuda
from icc.runtime.format.load import open_engine, read_manifest

pytestmark = pytest.mark.slow

FIELDS = {"max_seq_len": 32, "max_batch_size": 2, "max_step_tokens": 4}
PROMPTS = [[5, 9, 23, 7, 11], [8, 3]]
PARAMS = icc.SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoints(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two one-layer checkpoints with different weights."""
    folder = tmp_path_factory.mktemp("models")
    config = tiny.tiny_configs()["llama"]
    config.num_hidden_layers = 1  # the interpreter is slow
    for seed in (0, 1):
        tiny.save_tiny(config, folder / str(seed), seed=seed)
    return folder / "0", folder / "1"


@pytest.fixture(scope="module")
def engine(checkpoints: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("engine") / "both.engine"
    return icc.compile(checkpoints[0], output, target="cpu,h100", isa="avx2", **FIELDS)


@pytest.fixture(scope="module")
def alone(checkpoints: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The engine compiled for the CPU alone."""
    output = tmp_path_factory.mktemp("alone") / "cpu.engine"
    return icc.compile(checkpoints[0], output, target="cpu", isa="avx2", **FIELDS)


def driver_of(engine: Path) -> FakeDriver:
    """A fake H100 that maps the engine's cubins to their sources."""
    opened = open_engine(engine / "h100")
    program, limits = program_of(opened), opened.manifest.limits
    backend = TritonBackend(TARGETS["h100"], "f32")
    specs = backend._plan(program, limits, backend._tuner()).specs()
    assert program.plan is not None
    table = {opened.files.read(found.file): specs[name] for name, found in program.plan.objects.items()}
    return FakeDriver(table, version=13000, name="NVIDIA H100 PCIe")


def tokens(engine: Path, **options: Any) -> list[tuple[int, ...]]:
    with icc.load(engine, **options) as llm:
        return [tuple(one.token_ids) for one in llm.generate(PROMPTS, PARAMS)]


def test_a_machine_with_the_gpu_serves_from_it_and_any_from_its_cpu(
    engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_cpu = tokens(engine)
    driver = driver_of(engine)
    monkeypatch.setattr(compat, "open_gpu", lambda backend, ordinal=0: Cuda(ordinal, driver))
    assert tokens(engine) == on_cpu
    assert driver.eager_launches + driver.graph_launches > 0 and not driver.live and not driver.memory
    before = driver.eager_launches
    assert tokens(engine, target="cpu") == on_cpu and driver.eager_launches == before


def test_each_target_is_what_a_compile_for_it_alone_gives(engine: Path, alone: Path) -> None:
    both, one = open_engine(engine / "cpu"), open_engine(alone)
    assert both.program == one.program
    assert both.files.read("kernels/avx2.so") == one.files.read("kernels/avx2.so")
    for name in one.program.stored:
        np.testing.assert_array_equal(both.weights.view(name), one.weights.view(name))
    own = {name for name in one.manifest.files if not name.startswith(("runtime/", "click/"))}
    assert own <= both.manifest.files.keys()
    differ = {name for name in own if one.manifest.files[name].sha256 != both.manifest.files[name].sha256}
    assert differ <= {"weights.safetensors"}
    assert json.loads((alone / "report.json").read_bytes()) == json.loads((engine / "cpu/report.json").read_bytes())


def test_equal_tensors_lie_in_a_file_that_both_read(engine: Path) -> None:
    [shared] = read_manifest(engine / "cpu").main.shared
    assert shared == "shared/cpu+h100.safetensors" and read_manifest(engine / "h100").main.shared == [shared]
    opened = {target: open_engine(engine / target) for target in ("cpu", "h100")}
    places = {target: {place for place in own.weights.sizes()} for target, own in opened.items()}
    names = {target: own.program.stored.keys() for target, own in opened.items()}
    assert all(names[target] - places[target] for target in opened)  # other weights are in the shared file
    assert names["cpu"] - places["cpu"] == names["h100"] - places["h100"]
    assert len(list(engine.rglob("runtime/llm.py"))) == len(list(engine.rglob("tokenizer.json"))) + 1 == 1


def test_new_weights_go_into_every_target(
    engine: Path, checkpoints: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "both.engine"
    shutil.copytree(engine, other)
    before = tokens(other)
    icc.refit(other, checkpoints[1])
    assert (after := tokens(other)) != before
    driver = driver_of(other)
    monkeypatch.setattr(compat, "open_gpu", lambda backend, ordinal=0: Cuda(ordinal, driver))
    assert tokens(other) == after
    with pytest.raises(UsageError, match="is one target of an engine"):
        icc.refit(other / "cpu", checkpoints[1])
    delta = icc.compile(checkpoints[0], tmp_path / "delta", like=other / "cpu")
    assert tokens(delta) == before


def test_mistakes_are_told_before_anything_is_compiled(
    engine: Path, checkpoints: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*more: str) -> str:
        assert main.run(["compile", str(checkpoints[0]), "-o", str(tmp_path / "e"), *more], "icc") == 2
        assert not any(tmp_path.iterdir())
        return capsys.readouterr().err

    assert "cpu is there twice" in refused("--target", "cpu,h100,cpu")
    assert "unknown target 'h99'" in refused("--target", "cpu,h99")
    assert "--like is for one target" in refused("--target", "cpu,h100", "--like", str(engine))
    assert "holds several targets: cpu, h100" in refused("--target", "cpu", "--like", str(engine))
    assert "'neon' is unknown" in refused("--target", "cpu,h100", "--isa", "avx2,neon")
    assert "--isa avx2: --target h100 is for a GPU" in refused("--target", "h100", "--isa", "avx2")
    assert "is for this machine's CPU" in refused("--target", "native", "--isa", "avx2")

"""`icc compile --like`: engines that hold only the weights that differ from a base engine, and need it when opened."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import icc
import numpy as np
import pytest
from click.testing import CliRunner
from icc.compiler.cli import main
from icc.compiler.packing import pack_engine, unpack_engine
from icc.compiler.signing import sign_engine
from icc.runtime.errors import EngineChangedError, EngineFormatError, UsageError
from icc.runtime.format.load import open_engine
from icc.runtime.format.open_container import open_container
from icc.runtime.trust.minisign import SecretKey
from safetensors.torch import load_file, save_file

IDS = [3, 7, 1, 9, 40, 2]
LIMITS = {"max_seq_len": 64, "max_batch_size": 4}
BAN = """
import runpy, sys
class Ban:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("icc", "torch"):
            raise ImportError("banned: " + name)
sys.meta_path.insert(0, Ban())
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
CHANGED = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def models(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint, and one that differs in one matrix."""
    folder = tmp_path_factory.mktemp("models")
    tiny.save_tiny(tiny.tiny_configs()["llama"], folder / "base")
    shutil.copytree(folder / "base", folder / "tuned")
    tensors = load_file(folder / "base" / "model.safetensors")
    tensors[CHANGED] *= 1.5
    save_file(tensors, folder / "tuned" / "model.safetensors", {"format": "pt"})
    return folder / "base", folder / "tuned"


@pytest.fixture(scope="module")
def made(models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Path]]:
    """Compile an engine and a delta engine beside it."""
    found: dict[Any, tuple[Path, Path]] = {}

    def make(target: str = "native", **options: Any) -> tuple[Path, Path]:
        key = target, *sorted(options.items())
        if key not in found:
            folder = tmp_path_factory.mktemp("engines")
            options = {"quant": "rtn4", **LIMITS, **options}
            base = icc.compile(models[0], folder / "base.engine", target=target, **options)
            found[key] = base, icc.compile(models[1], folder / "delta.engine", like=base)
        return found[key]

    return make


def weights(path: Path) -> dict[str, bytes]:
    engine = open_engine(path)
    found = {name: engine.weights.view(name).tobytes() for name in engine.program.stored}
    engine.close()
    return found


@pytest.mark.parametrize("target", ["native", "h100"])
def test_a_delta_has_what_differs(
    target: str, made: Callable[..., tuple[Path, Path]], models: tuple[Path, Path], tmp_path: Path
) -> None:
    base, delta = made(target)
    assert {path.name for path in delta.iterdir()} == {
        "engine.json", "report.json", "canaries.json", "delta.safetensors", "__main__.py",
    }  # fmt: skip
    whole = icc.refit(base, models[1], tmp_path / "whole")
    assert weights(delta) == weights(whole) != weights(base)
    own, all_of_it = ((delta / "delta.safetensors").stat().st_size, (base / "weights.safetensors").stat().st_size)
    assert own < all_of_it / 5
    pack_engine(whole, tmp_path / "whole.icc")
    for other in (whole, tmp_path / "whole.icc"):
        found = CliRunner().invoke(main, ["diff", str(delta), str(other)])
        assert found.output.endswith("the engines are the same\n")


def test_it_runs(made: Callable[..., tuple[Path, Path]], models: tuple[Path, Path], tmp_path: Path) -> None:
    base, delta = made()
    whole = icc.refit(base, models[1], tmp_path / "whole")
    with icc.load(delta, verify_answers=True) as llm, icc.load(whole) as other, icc.load(base) as old:
        assert np.array_equal(llm.logits(IDS), other.logits(IDS))
        assert not np.array_equal(llm.logits(IDS), old.logits(IDS))
    for command in (["inspect"], ["inspect", "--memory"], ["doctor", "--hashes"], ["run", "--help"]):
        done = CliRunner().invoke(main, [command[0], str(delta), *command[1:]])
        assert done.exit_code == 0, done.output
    assert f"delta_of: {base}" in CliRunner().invoke(main, ["inspect", str(delta)]).output


def test_as_one_file(made: Callable[..., tuple[Path, Path]], tmp_path: Path) -> None:
    """A delta and its base, each as one file or as a directory."""
    base, delta = made()
    with icc.load(delta) as llm:
        wanted = llm.logits(IDS)
    pack_engine(delta, tmp_path / "delta.icc")
    with pytest.raises(EngineFormatError, match="is a delta of another engine"):
        icc.load(tmp_path / "delta.icc")
    shutil.copytree(base, tmp_path / "base.engine")
    for _ in range(2):
        with icc.load(tmp_path / "delta.icc", verify_answers=True) as llm:
            assert np.array_equal(llm.logits(IDS), wanted)
        if (tmp_path / "base.engine").is_dir():
            pack_engine(tmp_path / "base.engine", tmp_path / "base.icc")
            shutil.rmtree(tmp_path / "base.engine")
    raw = bytearray((tmp_path / "base.icc").read_bytes())
    raw[raw.index(open_container(tmp_path / "base.icc").read("weights.safetensors")) + 5000] ^= 1
    (tmp_path / "base.icc").write_bytes(raw)
    with pytest.raises(EngineChangedError, match=r"base\.icc/weights\.safetensors, in the base"):
        icc.load(tmp_path / "delta.icc")


def test_python_runs_it_by_the_runtime_of_its_base(made: Callable[..., tuple[Path, Path]], tmp_path: Path) -> None:
    """Each as one file or as a directory, without an installed icc. Without its base it says so."""

    def run(engine: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", BAN, engine, "bench", "--prompt-tokens", "4", "--output-tokens", "2"]
        return subprocess.run([*command, "--json"], cwd=tmp_path, capture_output=True, text=True)

    base, delta = made()
    pack_engine(delta, tmp_path / "delta.icc")
    shutil.copytree(delta, tmp_path / "delta.engine")
    for engine in ("delta.icc", "delta.engine"):
        done = run(engine)
        assert (
            done.returncode == 20
            and f"is a delta of {tmp_path}/base.engine" in done.stderr
            and "Traceback" not in done.stderr
        )
    pack_engine(base, tmp_path / "base.icc")
    for engine in ("delta.icc", "delta.engine"):
        done = run(engine)
        assert done.returncode == 0 and json.loads(done.stdout), done.stderr
    (tmp_path / "base.icc").rename(tmp_path / "packed.icc")
    unpack_engine(tmp_path / "packed.icc", tmp_path / "base.engine")
    assert run("delta.icc").returncode == 0


def test_a_base_that_was_one_file_and_was_unpacked(
    made: Callable[..., tuple[Path, Path]], models: tuple[Path, Path], tmp_path: Path
) -> None:
    pack_engine(made()[0], tmp_path / "own.icc")
    delta = icc.compile(models[1], tmp_path / "delta.engine", like=tmp_path / "own.icc")
    unpack_engine(tmp_path / "own.icc", tmp_path / "own.engine")
    (tmp_path / "own.icc").unlink()
    icc.load(delta).close()
    shutil.rmtree(tmp_path / "own.engine")
    with pytest.raises(EngineFormatError, match=r"which is not at .*own\.icc$") as caught:
        icc.load(delta)
    assert caught.value.hint == "put that engine beside it, as own.icc"


def test_the_summary_names_the_quantization_of_the_base(
    made: Callable[..., tuple[Path, Path]], models: tuple[Path, Path], tmp_path: Path
) -> None:
    arguments = ["compile", models[1], "--like", made()[0], "-o", tmp_path / "delta.engine"]
    done = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert done.exit_code == 0 and "bits per weight (rtn4)" in " ".join(done.output.split())


def test_a_key_is_asked_about_the_base_too(made: Callable[..., tuple[Path, Path]], tmp_path: Path) -> None:
    """Its runtime runs, so no file may lie there that the signature does not cover."""
    for path in made():
        shutil.copytree(path, tmp_path / path.name)
    key = SecretKey.new()
    sign_engine(tmp_path / "delta.engine", key)
    command = ["verify", str(tmp_path / "delta.engine"), "--key", key.public.text()]
    assert CliRunner().invoke(main, command).exit_code == 0
    (tmp_path / "base.engine" / "runtime" / "x.py").write_text("")
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 50 and "base.engine: runtime/x.py is not what was signed" in done.output


def test_where_the_base_lies(made: Callable[..., tuple[Path, Path]], tmp_path: Path) -> None:
    base, delta = made()
    shutil.copytree(base, tmp_path / "elsewhere" / "base.engine")
    shutil.copytree(delta, tmp_path / "elsewhere" / "delta.engine")
    icc.load(tmp_path / "elsewhere" / "delta.engine").close()
    os.rename(tmp_path / "elsewhere" / "base.engine", tmp_path / "base")
    with pytest.raises(EngineFormatError, match="is a delta of another engine") as caught:
        icc.load(tmp_path / "elsewhere" / "delta.engine")
    assert caught.value.hint == "put that engine beside it, as base.engine"
    shutil.copytree(delta, tmp_path / "elsewhere" / "base.engine")
    with pytest.raises(EngineFormatError):
        icc.load(tmp_path / "elsewhere" / "delta.engine")
    shutil.rmtree(tmp_path / "elsewhere" / "base.engine")
    other, _ = made(quant="int8")
    shutil.copytree(other, tmp_path / "elsewhere" / "base.engine")
    with pytest.raises(EngineFormatError, match=r"base\.engine is another"):
        icc.load(tmp_path / "elsewhere" / "delta.engine")


@pytest.mark.parametrize("name", ["weights.safetensors", "program.json"])
def test_a_base_that_was_changed(name: str, made: Callable[..., tuple[Path, Path]], tmp_path: Path) -> None:
    for path in made():
        shutil.copytree(path, tmp_path / path.name)
    file = tmp_path / "base.engine" / name
    raw = bytearray(file.read_bytes())
    raw[-100] ^= 1
    file.write_bytes(raw)
    with pytest.raises(EngineChangedError, match=f"{re.escape(str(file))}, in the base of this delta, has changed"):
        icc.load(tmp_path / "delta.engine")


def test_options_are_the_engines(
    made: Callable[..., tuple[Path, Path]], models: tuple[Path, Path], tmp_path: Path
) -> None:
    base, delta = made()
    with pytest.raises(UsageError, match=r"--quant awq4: .* was compiled with rtn4"):
        icc.compile(models[1], tmp_path / "engine", like=base, quant="awq4")
    with pytest.raises(UsageError, match="that is a delta itself"):
        icc.compile(models[1], tmp_path / "engine", like=delta)
    with pytest.raises(UsageError, match=r"--tensor-parallel 2: .* was compiled without it"):
        icc.compile(models[1], tmp_path / "engine", like=base, tensor_parallel=2)
    before = (base / "engine.json").read_bytes()
    with pytest.raises(UsageError, match="is the engine of --like, which the delta needs"):
        icc.compile(models[1], base.parent / "other" / ".." / base.name, like=base, force=True)
    assert (base / "engine.json").read_bytes() == before
    assert not list(tmp_path.iterdir())
    whole = icc.refit(delta, models[0], tmp_path / "engine")
    assert weights(whole) == weights(base)


@pytest.mark.parametrize("ranks", [{"tensor_parallel": 2}, {"pipeline_parallel": 2}])
def test_each_rank_has_what_differs(
    ranks: dict[str, int], made: Callable[..., tuple[Path, Path]], models: tuple[Path, Path], tmp_path: Path
) -> None:
    """Each rank has a delta beside the base's file of that rank; the answers are those of the checkpoint compiled
    alone, also as one file. A changed file is refused with the number of its rank."""
    base, delta = made(quant="none", **ranks)
    assert {path.name for path in delta.iterdir() if path.suffix == ".safetensors"} == {
        "delta.safetensors", "delta-1.safetensors",
    }  # fmt: skip
    sizes = [(delta / name).stat().st_size for name in ("delta.safetensors", "delta-1.safetensors")]
    assert sum(sizes) < (base / "weights.safetensors").stat().st_size / 2
    whole = icc.refit(base, models[1], tmp_path / "whole")
    pack_engine(delta, delta.parent / "delta.icc")
    found: list[np.ndarray] = []
    for path in (whole, delta, delta.parent / "delta.icc", base):
        with icc.load(path, threads=2) as llm:
            found.append(llm.logits(IDS))
    assert np.array_equal(found[0], found[1]) and np.array_equal(found[1], found[2])
    assert not np.array_equal(found[0], found[3])
    shutil.copytree(delta, delta.parent / "changed.engine")
    file = delta.parent / "changed.engine" / "delta-1.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x7f")
    with pytest.raises(icc.IccError, match=r"rank 1: delta-1\.safetensors has changed"):
        icc.load(delta.parent / "changed.engine")

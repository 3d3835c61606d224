"""`icc refit`: other weights of the same shapes in an existing engine."""

from __future__ import annotations

import filecmp
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import icc
import pytest
from click.testing import CliRunner
from icc.compiler.cli import main
from icc.compiler.engine import directory
from icc.compiler.engine.atomic import engine_output
from icc.compiler.engine.earlier import open_earlier
from icc.compiler.errors import MismatchError, OutputExistsError
from icc.compiler.options import CompileOptions
from icc.compiler.packing import pack_engine
from icc.compiler.request import check
from icc.runtime.errors import UsageError
from icc.runtime.format.digest import encode_sealed
from icc.runtime.format.load import read_manifest
from icc.runtime.format.manifest import FileEntry
from sizes import soak

LIMITS = {"max_seq_len": 64, "max_batch_size": 4}
IDS = [3, 7, 1, 9, 40, 2]


@pytest.fixture(scope="module")
def model(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes a tiny llama with random weights by seed, with given values in its configuration."""
    made: dict[Any, Path] = {}

    def make(seed: int, **values: Any) -> Path:
        key = seed, *sorted(values.items())
        if key not in made:
            made[key] = tmp_path_factory.mktemp("model")
            config = tiny.tiny_configs()["llama"]
            config.update(values)
            tiny.save_tiny(config, made[key], seed=seed)
        return made[key]

    return make


@pytest.fixture(scope="module")
def engine(model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Compiles an engine by the seed of its model."""
    made: dict[Any, Path] = {}

    def make(seed: int, target: str = "native", quant: str = "rtn4", **options: Any) -> Path:
        key = seed, target, quant, *sorted(options.items())
        if key not in made:
            output = tmp_path_factory.mktemp("engines") / "engine"
            made[key] = icc.compile(model(seed), output, target=target, quant=quant, **LIMITS, **options)
        return made[key]

    return make


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("target", "options"),
    [
        ("native", {}),
        ("native", {"quant": "none", "adapters": "2x8", "task": "embed"}),
        ("native", {"quant": "awq4", "keep": ("*.0.mlp*",), "calib_sequences": 2, "calib_length": 32}),
        ("h100", {}),
        ("native", {"quant": "none", "tensor_parallel": 2, "adapters": "2x8"}),
        *soak(("native", {"pipeline_parallel": 2}), ("native", {"quant": "int8", "spec": "layer-skip:1"})),
    ],
)
def test_it_is_what_a_compile_gives(
    target: str, options: dict[str, Any], engine: Callable[..., Path], model: Callable[..., Path], tmp_path: Path
) -> None:
    old, wanted = (engine(seed, target, **options) for seed in (0, 1))
    before = contents(old)
    found = icc.refit(old, model(1), tmp_path / "engine")
    assert contents(found) == contents(wanted) != before == contents(old)


def test_a_tokenizer_that_the_engine_keeps_is_not_missed(model: Callable[..., Path], tmp_path: Path) -> None:
    options = CompileOptions(model=model(1), output=tmp_path / "engine")
    assert any("tokenizer.json" in warning for warning in check(options).warnings)
    assert not check(options, has_other=True).warnings


def test_in_its_place_while_it_runs(engine: Callable[..., Path], model: Callable[..., Path], tmp_path: Path) -> None:
    own = tmp_path / "engine"
    shutil.copytree(engine(0), own)
    with icc.load(own) as llm:
        before = llm.logits(IDS).tobytes()
        done = CliRunner().invoke(main, ["refit", str(own), str(model(1)), "--json"])
        assert done.exit_code == 0 and json.loads(done.stdout)["options"]["quant"] == "rtn4"
        assert llm.logits(IDS).tobytes() == before
    with icc.load(own, verify_answers=True) as llm, icc.load(engine(1)) as other:
        assert llm.logits(IDS).tobytes() == other.logits(IDS).tobytes() != before
    assert [path.name for path in tmp_path.iterdir()] == ["engine"]


def test_as_one_file(engine: Callable[..., Path], model: Callable[..., Path], tmp_path: Path) -> None:
    """A compile, a refit and a refit in place to one file all write the bytes of their packed directory."""
    pack_engine(engine(1), tmp_path / "wanted.icc")
    pack_engine(engine(0), tmp_path / "own.icc")
    wanted = (tmp_path / "wanted.icc").read_bytes()
    assert icc.refit(tmp_path / "own.icc", model(1), tmp_path / "other.icc").read_bytes() == wanted
    assert (tmp_path / "own.icc").read_bytes() != wanted
    done = CliRunner().invoke(main, ["refit", str(tmp_path / "own.icc"), str(model(1))])
    assert done.exit_code == 0 and (tmp_path / "own.icc").read_bytes() == wanted
    compiled = icc.compile(model(1), tmp_path / "made.icc", target="native", quant="rtn4", **LIMITS)
    assert compiled.read_bytes() == wanted
    with pytest.raises(OutputExistsError):
        icc.compile(model(1), tmp_path / "made.icc", target="native", **LIMITS)
    again = CliRunner().invoke(main, ["compile", str(compiled)])
    assert again.exit_code == 10 and "is an engine, compiled already" in again.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made.icc", "other.icc", "own.icc", "wanted.icc"]


def test_it_says_what_a_refit_in_place_removes(
    engine: Callable[..., Path], model: Callable[..., Path], tmp_path: Path
) -> None:
    """A signature is of the old weights. A refit to another place leaves the old engine as it was."""
    own = tmp_path / "engine"
    shutil.copytree(engine(0), own)
    for name in ("engine.json.minisig", "sbom.cdx.json"):
        (own / name).write_text("{}")
    done = CliRunner().invoke(main, ["refit", str(own), str(model(1)), "-o", str(tmp_path / "other")])
    assert done.exit_code == 0 and "has lost" not in done.output and (own / "sbom.cdx.json").exists()
    done = CliRunner().invoke(main, ["refit", str(own), str(model(1))])
    assert done.exit_code == 0 and f"{own} has lost engine.json.minisig, sbom.cdx.json" in done.output
    assert contents(own) == contents(tmp_path / "other")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"hidden_size": 128}, "hidden_size: the engine has 64, the checkpoint 128"),
        ({"num_hidden_layers": 3}, "num_layers: the engine has 2, the checkpoint 3"),
        ({"tie_word_embeddings": True}, "weights tied"),
        ({"rms_norm_eps": 0.25}, "step 1 is rms_norm with eps 1e-6, of the other 0.25"),
        ({"max_position_embeddings": 32}, "max_seq_len|positions"),
    ],
)
def test_what_does_not_fit(
    values: dict[str, Any], words: str, engine: Callable[..., Path], model: Callable[..., Path], tmp_path: Path
) -> None:
    before = contents(engine(0))
    with pytest.raises(icc.IccError, match=words) as caught:
        icc.refit(engine(0), model(0, **values))
    assert caught.value.hint and "\n" not in str(caught.value)
    with pytest.raises(icc.IccError):
        icc.refit(engine(0), model(0, **values), tmp_path / "engine")
    assert contents(engine(0)) == before and not list(tmp_path.iterdir())


def test_one_that_fails_leaves_the_engine(
    engine: Callable[..., Path], model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    own = tmp_path / "engine"
    shutil.copytree(engine(0), own)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(directory, "write_manifest", full)
    with pytest.raises(icc.IccError, match="the disk is full"):
        icc.refit(own, model(1))
    assert contents(own) == contents(engine(0)) and len(list(tmp_path.iterdir())) == 1


def test_a_disk_that_is_full_where_the_runtime_is_copied_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The copy of every file of the runtime fails; the error is still one line."""

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(icc.IccError, match=r"cannot write .*engine: the disk is full$"):
        with engine_output(tmp_path / "engine") as stage:
            directory.copy_runtime(stage)
    assert not list(tmp_path.iterdir())


def test_files_that_a_compile_was_given(
    model: Callable[..., Path], engine: Callable[..., Path], tmp_path: Path
) -> None:
    """Such files must be given again; their paths are not recorded."""
    adapter = tmp_path / "adapter"
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model(0))
    get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(adapter)
    merged = icc.compile(model(0), tmp_path / "merged", target="native", lora=adapter, **LIMITS)
    assert str(tmp_path).encode() not in (merged / "report.json").read_bytes()
    with pytest.raises(UsageError, match="was compiled with --lora") as caught:
        icc.refit(merged, model(1))
    assert caught.value.hint == "give it again: --lora DIR"
    found = icc.refit(merged, model(1), tmp_path / "other", lora=adapter)
    wanted = icc.compile(model(1), tmp_path / "wanted", target="native", lora=adapter, **LIMITS)
    assert filecmp.cmp(found / "engine.json", wanted / "engine.json", shallow=False)
    with pytest.raises(UsageError, match=r"--calib: .* was compiled without"):
        icc.refit(engine(0), model(1), calib=adapter)


def test_an_engine_that_does_not_tell(engine: Callable[..., Path], model: Callable[..., Path], tmp_path: Path) -> None:
    own = tmp_path / "engine"
    shutil.copytree(engine(0), own)
    report = own / "report.json"
    report.write_text("{}")
    manifest = read_manifest(own)
    manifest.files["report.json"] = FileEntry(2, "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a")
    (own / "engine.json").write_bytes(encode_sealed(manifest))
    with pytest.raises(UsageError, match="does not say how it was compiled: icc"):
        icc.refit(own, model(1))


def test_another_program_is_named(engine: Callable[..., Path]) -> None:
    """The refusal names the first weight that differs, the cache, or a step."""
    first, second = open_earlier(engine(0)), open_earlier(engine(0, quant="int8"))
    with pytest.raises(MismatchError, match=r"proj.weight: the engine has \S+\[.*, the other "):
        first.built(second.program, first.engine.manifest.limits)
